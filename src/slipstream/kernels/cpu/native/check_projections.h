// Checks of the matrices around a block's attention, or around its recurrence. Included by check.cpp alone.
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

// A recurrence's input, `size` outputs per key head, within its projection.
Status part(const Recurrence& r, const Part& p, int64_t heads, int64_t size) {
    if (p.matrix < 0 || p.matrix >= r.num_projections || p.start < 0 || p.start >= kLargest || p.step < 0 ||
        p.step >= kLargest)
        return kRange;
    return p.start + (heads - 1) * p.step + size <= r.projections[p.matrix].outputs ? kOk : kShape;
}

// A part that is convolved.
Status convolved(const Recurrence& r, const Part& p, int64_t heads, int64_t size) {
    if (p.channel < 0 || p.channel > r.channels - heads * size)
        return kShape;
    return part(r, p, heads, size);
}

// The heads of a recurrence with a rule; sets the width of the mixer's output.
Status rule(const Recurrence& r, int64_t& joined) {
    if (!is_size(r.key_heads) || !is_size(r.value_heads) || !is_size(r.key_dim) || !is_size(r.value_dim) ||
        r.value_heads % r.key_heads)
        return kShape;
    const int64_t each = r.value_heads / r.key_heads, keys = r.key_heads * r.key_dim;
    joined = r.value_heads * r.value_dim;
    if (!is_size(keys) || !is_size(joined) || !fits(r.value_heads * r.key_dim, r.value_dim) ||
        r.channels != 2 * keys + joined)
        return kShape;
    Status status = convolved(r, r.q, r.key_heads, r.key_dim);
    status = first_of(status, convolved(r, r.k, r.key_heads, r.key_dim));
    status = first_of(status, convolved(r, r.v, r.key_heads, each * r.value_dim));
    status = first_of(status, part(r, r.gate, r.key_heads, each * r.value_dim));
    status = first_of(status, part(r, r.rate, r.key_heads, each));
    status = first_of(status, part(r, r.decay, r.key_heads, each));
    status = first_of(status, first_of(tensor(r.speed, r.speed_dtype), tensor(r.shift, r.shift_dtype)));
    status = first_of(status, optional(r.skip, r.skip_dtype));
    if (status != kOk || r.norm.kind == kNoNorm)
        return first_of(status, r.norm_width ? kShape : kOk);
    if (!is_size(r.norm_width) || joined % r.norm_width)
        return kShape;
    return norm(r.norm, r.norm_width, joined);
}

// The projections of a selective state space's values.
Status selective(const Recurrence& r, const StackCall& call) {
    constexpr int64_t kTallest = 256;
    const int64_t low = r.steps.inputs, all = low + 2 * r.key_dim;
    if (r.key_heads != 1 || r.value_heads != 1 || r.value_dim != r.channels || r.norm.kind != kNoNorm ||
        r.gate_first)
        return kUnsupported;
    if (!is_size(r.key_dim) || r.key_dim > kTallest || !is_size(low) || !fits(call.step.tokens, all) ||
        !fits(r.channels, r.key_dim))
        return kShape;
    Status status = first_of(convolved(r, r.v, 1, r.channels), part(r, r.gate, 1, r.channels));
    status = first_of(status, first_of(tensor(r.speed, r.speed_dtype), optional(r.skip, r.skip_dtype)));
    status = first_of(status, r.shift || r.v.channel ? kUnsupported : kOk);
    status = first_of(status, matrix(r.mixed, all, r.channels));
    status = first_of(status, matrix(r.steps, r.channels, low));
    for (const Norm* n : {&r.key_norm, &r.query_norm})
        status = first_of(status, norm(*n, r.key_dim, r.key_dim));
    return first_of(status, norm(r.step_norm, low, low));
}

// A block's recurrence.
Status recurrence(const Recurrence& r, const Block& b, const StackCall& call) {
    constexpr int64_t kMostProjections = 6, kWidest = 8;
    if (!call.caches || call.step.heads_first || b.post || b.parallel || b.latent || b.across)
        return kUnsupported;
    if (!b.beside && (b.gate || b.clip != 0.0f || b.qk_norm || b.table >= 0))
        return kUnsupported;
    if (r.rule < kNoRule || r.rule >= kRules || r.gate_first < 0 || r.gate_first > 1 ||
        !(r.least_step >= 0.0f))
        return kUnsupported;
    if (r.num_projections < 1 || r.num_projections > kMostProjections || r.width < 2 || r.width > kWidest ||
        !is_size(r.channels) || !is_size(r.channels * r.width))
        return kShape;
    if (!r.projections)
        return kNull;
    Status status = first_of(tensor(r.kernel, r.kernel_dtype), optional(r.kernel_bias, r.bias_dtype));
    int64_t width = 0, joined = r.channels;
    for (int64_t i = 0; status == kOk && i < r.num_projections; ++i) {
        status = matrix(r.projections[i], r.projections[i].outputs, b.hidden);
        width += r.projections[i].outputs;
    }
    if (status != kOk)
        return status;
    if (r.rule == kNoRule) {
        if (r.key_heads || r.value_heads || r.key_dim || r.value_dim || r.norm.kind != kNoNorm)
            return kShape;
        for (const Part* p : {&r.q, &r.v, &r.gate})
            status = first_of(status, part(r, *p, 1, r.channels));
    } else {
        status = r.rule == kSelective ? selective(r, call) : rule(r, joined);
    }
    if (status == kOk && (!fits(call.step.tokens, width) || !fits(call.step.tokens, joined)))
        return kShape;
    return first_of(status, matrix(r.out, b.hidden, joined));
}

// The projections of a block to queries, keys and values, and of the heads' output.
Status projections(const Block& b, const StackCall& call) {
    if (b.table >= 0 && 2 * call.tables[b.table].half > (b.latent ? b.latent->rotated : b.head_dim))
        return kShape;
    if (b.keys_values < kOwnValues || b.keys_values >= kKeysValues || b.v_norm.weight || b.v_norm.bias)
        return kUnsupported;
    if (b.keys_values != kOwnValues && (!call.caches || b.clip != 0.0f || b.latent || b.recurrence))
        return kUnsupported;
    if (b.growth != 0.0f &&
        (b.latent || b.recurrence || !(b.growth_period > 0.0f) || !(b.growth_offset >= 0.0f)))
        return kUnsupported;
    if (b.v_norm.kind != kNoNorm && (b.latent || b.recurrence))
        return kUnsupported;
    if (const Status status = norm(b.v_norm, b.head_dim, b.head_dim); status != kOk)
        return status;
    if (b.beside < 0 || b.beside > 1 || (b.beside && !b.recurrence))
        return kUnsupported;
    const Status mixer = b.recurrence ? recurrence(*b.recurrence, b, call) : kOk;
    if (mixer != kOk || (b.recurrence && !b.beside))
        return mixer;
    if (b.latent)
        return latent(*b.latent, b, call);
    const int64_t q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim;
    const int64_t keys_values = b.keys_values == kBorrowed ? 0 : b.keys_values == kKeysAsValues ? kv : 2 * kv;
    const int64_t projected = q + keys_values + (!b.gate ? 0 : b.gates_heads ? b.heads : q);
    if (!fits(call.step.tokens, projected))
        return kShape;
    return first_of(matrix(b.qkv, projected, b.hidden), matrix(b.attn_out, b.hidden, q));
}

} // namespace
} // namespace slipstream
