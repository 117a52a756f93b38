// Checks of the matrices around a block's attention, latent or not. Included by check.cpp alone.
#pragma once

#include "check_parts.h"

namespace slipstream {
namespace {

// A block's latent attention.
Status latent(const Latent& l, const Block& b, const StackCall& call) {
    constexpr int64_t kMostApart = 512;
    if (!is_size(l.rank) || !is_size(l.plain) || !is_size(l.rotated) || !is_size(l.value))
        return kShape;
    if (b.head_dim != l.plain + l.rotated || l.value > b.head_dim || b.kv_heads != b.heads)
        return kShape;
    if (l.apart && (l.apart != 1 || l.rotated % 2 || l.rotated > kMostApart))
        return kUnsupported;
    if (b.gate || b.clip != 0.0f || b.qk_norm || b.across || b.mask.alibi || b.mask.sinks || b.mask.relative)
        return kUnsupported;
    if (call.caches && (call.cache_dtype == kInt8Codes || call.step.heads_first))
        return kUnsupported;
    // The widest rows: queries multiplied with the keys' projections, and expanded keys and values. There are
    // as many of the latter as tokens in the cache's pages.
    const int64_t width = l.rank + l.rotated, both = l.plain + l.value;
    const int64_t pages = call.caches ? call.step.sequences * call.step.table_width : 0;
    if (Status status = heads(b.heads, 1, width); status != kOk)
        return status;
    if (!is_size(b.heads * both) || !fits(call.step.tokens, b.heads * width))
        return kShape;
    if (pages && (!is_size(pages) ||
                  !fits(pages * call.step.block_size, b.heads * (both > b.head_dim ? both : b.head_dim))))
        return kShape;
    if (!l.keys || !l.values)
        return kNull;
    const int64_t short_query = l.query_down.outputs;
    if (short_query && !fits(call.step.tokens, short_query))
        return kShape;
    Status status = matrix(b.qkv, b.heads * b.head_dim, short_query ? short_query : b.hidden);
    if (short_query)
        status = first_of(status, matrix(l.query_down, short_query, b.hidden));
    status = first_of(status, matrix(l.down, width, b.hidden));
    status = first_of(status, exact_matrix(l.up, b.heads * both, l.rank));
    status = first_of(status, matrix(b.attn_out, b.hidden, b.heads * l.value));
    if (short_query)
        status = first_of(status, norm(l.query_norm, short_query, short_query));
    status = first_of(status, norm(l.norm, l.rank, l.rank));
    for (int64_t h = 0; status == kOk && h < b.heads; ++h)
        status =
            first_of(exact_matrix(l.keys[h], l.rank, l.plain), exact_matrix(l.values[h], l.value, l.rank));
    return status;
}

// The projections of a block to queries, keys and values, and of the heads' output.
Status projections(const Block& b, const StackCall& call) {
    if (b.table >= 0 && 2 * call.tables[b.table].half > (b.latent ? b.latent->rotated : b.head_dim))
        return kShape;
    if (b.latent)
        return latent(*b.latent, b, call);
    const int64_t q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim;
    const int64_t projected = q + 2 * kv + (!b.gate ? 0 : b.gates_heads ? b.heads : q);
    if (!fits(call.step.tokens, projected))
        return kShape;
    return first_of(matrix(b.qkv, projected, b.hidden), matrix(b.attn_out, b.hidden, q));
}

} // namespace
} // namespace slipstream
