// The two standalone attention calls: over a paged cache, and over a padded batch.
#pragma once

namespace slipstream {
namespace {

struct PagedAttentionScratch {
    PagedAttentionScratch(const PagedAttentionCall& call, char* base, int threads)
        : heads({call.heads, call.kv_heads, call.head_dim}), spans(spans_of(call.step)) {
        Scratch scratch(base);
        room.include(spans, heads, threads);
        room.reserve(scratch, threads);
        bytes = scratch.used();
    }
    Heads heads;
    Spans spans;
    AttentionRoom room;
    int64_t bytes;
};

inline int64_t paged_attention_bytes(const PagedAttentionCall& call, int threads) {
    return PagedAttentionScratch(call, nullptr, threads).bytes;
}

inline void paged_attention(const PagedAttentionCall& call, char* base, Team& team, int rank) {
    const PagedAttentionScratch scratch(call, base, team.size());
    if (rank == 0)
        make_plan(scratch.spans, scratch.heads, team, scratch.room);
    team.meet();
    const Heads& heads = scratch.heads;
    const Pages pages = pages_of(call.step);
    Attention a = upon_cache(heads, call.cache, call.cache_dtype, pages, call.mask);
    a.q = {call.q, call.dtype, 0, heads.heads * heads.dim, heads.dim};
    a.out = a.q;
    a.out.data = call.out;
    a.pairs = multiplies_pairs(call.dtype, call.cache_dtype);
    attend(a, team, rank, scratch.room);
}

// Return the heads and tile sizes of a call. If every query sees all keys, as in an image, tiles are as large
// as possible while leaving several per thread, because packing a tile's keys is most of the work for small
// head dims. Measured with 4096 queries and keys and 8 heads of 40: 184 ms with tiles of 64, 104 ms with 512.
inline Heads heads_of(const AttentionCall& call, int threads) {
    constexpr int64_t kLargestTile = 512, kTiles = 4, kFloats = 1 << 16;
    Heads heads = {call.heads, call.kv_heads, call.head_dim};
    if (call.causal || call.mask.window)
        return heads;
    const int64_t wanted = kTiles * static_cast<int64_t>(threads), group = heads.group();
    for (int64_t rows = kLargestTile; rows > kTileRows; rows /= 2) {
        const int64_t tiles = ceil_div(call.queries, most(1, rows / group));
        if (rows * heads.dim > kFloats || call.batch * heads.kv_heads * tiles < wanted)
            continue;
        heads.tile_rows = heads.tile_tokens = rows;
        break;
    }
    return heads;
}

struct AttentionScratch {
    AttentionScratch(const AttentionCall& call, char* base, int threads) : heads(heads_of(call, threads)) {
        spans = {call.batch, nullptr, nullptr, call.queries, call.keys, call.causal != 0, false, nullptr};
        Scratch scratch(base);
        trims = call.bias.data && !call.bias.row && !call.bias.head && !call.causal;
        seen = scratch.part<int32_t>(trims ? call.batch : 0);
        room.include(spans, heads, threads);
        room.reserve(scratch, threads);
        bytes = scratch.used();
    }
    Heads heads;
    Spans spans;
    AttentionRoom room;
    int32_t* seen;
    bool trims; // the mask hides the same keys from all queries, so trailing hidden keys can be skipped
    int64_t bytes;
};

inline int64_t attention_bytes(const AttentionCall& call, int threads) {
    return AttentionScratch(call, nullptr, threads).bytes;
}

// Return the number of keys up to the last one that the mask does not hide from sequence n; all keys if it
// hides every one.
inline int32_t visible_keys(const AttentionCall& call, int64_t n) {
    constexpr float kAsGoodAsHidden = -1.0e30f;
    for (int64_t keys = call.keys; keys > 0; --keys) {
        const int64_t at = n * call.bias.batch + keys - 1;
        float value = 0.0f;
        if (call.bias.dtype == kBoolean)
            value = static_cast<const uint8_t*>(call.bias.data)[at] ? 0.0f : kNever;
        else
            read_row(call.bias.data, call.bias.dtype, at, &value, 1);
        if (value > kAsGoodAsHidden)
            return static_cast<int32_t>(keys);
    }
    return static_cast<int32_t>(call.keys);
}

inline View view_of(const Strided& s, int32_t dtype) {
    return {s.data, dtype, s.batch, s.row, s.head};
}

inline void attention(const AttentionCall& call, char* base, Team& team, int rank) {
    AttentionScratch scratch(call, base, team.size());
    if (scratch.trims)
        scratch.spans.seen = scratch.seen;
    if (rank == 0) {
        for (int64_t n = 0; scratch.trims && n < call.batch; ++n)
            scratch.seen[n] = visible_keys(call, n);
        make_plan(scratch.spans, scratch.heads, team, scratch.room);
    }
    team.meet();
    const Heads& heads = scratch.heads;
    const int64_t width = heads.heads * heads.dim;
    Attention a = {};
    a.heads = heads;
    a.q = view_of(call.q, call.dtype);
    a.k = view_of(call.k, call.dtype);
    a.v = view_of(call.v, call.dtype);
    a.out = {call.out, call.dtype, call.queries * width, width, heads.dim};
    a.mask = &call.mask;
    const Scores bias = {call.bias.data, call.bias.dtype, call.bias.batch, call.bias.row, call.bias.head};
    a.bias = call.bias.data ? &bias : nullptr;
    a.causal = call.causal != 0;
    a.pairs = multiplies_pairs(call.dtype, call.dtype);
    attend(a, team, rank, scratch.room);
}

} // namespace
} // namespace slipstream
