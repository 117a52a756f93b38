// Attention over the paged cache: a few queries of the heads that share a kv head, one cache block after
// another, with a running maximum and sum; scores of more than one tile never exist.
//
// Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; Dao et al. 2022 (arXiv 2205.14135),
// algorithm 1.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kTileTokens = 16; // queries of one sequence in a tile
constexpr int64_t kTileRows = 32;   // query heads times queries
constexpr int64_t kTileKeys = 64;
constexpr float kNothing = -3.0e38f; // below every score; the difference of two of them is no NaN

// Queries of one sequence that are worked on together.
struct Tile {
    int64_t sequence, token, count, position;
};

struct Attention {
    const float* q; // token t's heads at q + t * q_stride
    float* out;
    Bf16* rounded; // the same again in bfloat16, or null
    int64_t q_stride, out_stride;
    const void *k_cache, *v_cache;
    int32_t cache_dtype;
    int64_t heads, kv_heads, dim;
    const Mask* mask;
    const Step* step;
    const Tile* tiles;
    int64_t num_tiles;
};

inline int64_t most_tiles(const Step& step) {
    return step.sequences + step.tokens / kTileTokens;
}

inline int64_t make_tiles(const Step& step, Tile* tiles) {
    int64_t count = 0;
    for (int64_t n = 0; n < step.sequences; ++n) {
        const int64_t begin = step.query_starts[n], end = step.query_starts[n + 1];
        for (int64_t t = begin; t < end; t += kTileTokens)
            tiles[count++] = {n, t, least(kTileTokens, end - t), step.kv_lens[n] - (end - t)};
    }
    return count;
}

inline int64_t attention_floats(int64_t dim) {
    return kTileRows * (2 * dim + kTileKeys + 2);
}

// One row of scores of keys [0, n) becomes weights; returns the factor for what was summed before.
inline float soften(float* scores, int64_t n, int64_t from, int64_t to, float& top, float& sum) {
    float highest = top;
    for (int64_t j = from; j < to; ++j)
        highest = scores[j] > highest ? scores[j] : highest;
    const float factor = exponential(Vec::set(top - highest)).sum() / Vec::kWidth;
    top = highest;
    for (int64_t j = 0; j < from; ++j)
        scores[j] = 0.0f;
    for (int64_t j = to; j < n; ++j)
        scores[j] = 0.0f;
    Vec total = Vec::set(0);
    for (int64_t j = from; j < to; j += Vec::kWidth) {
        const int64_t count = least(to - j, Vec::kWidth);
        exponential(Vec::load(scores + j, count) - Vec::set(highest)).store(scores + j, count);
        total = total + Vec::load(scores + j, count);
    }
    sum = sum * factor + total.sum();
    return factor;
}

inline void bend(const Mask& mask, float* scores, int64_t n, float slope, int64_t distance) {
    if (mask.softcap != 0.0f) {
        const Vec cap = Vec::set(mask.softcap), inverse = Vec::set(1.0f / mask.softcap);
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            (cap * tangent(Vec::load(scores + j, count) * inverse)).store(scores + j, count);
        }
    }
    if (mask.alibi)
        for (int64_t j = 0; j < n; ++j)
            scores[j] += slope * static_cast<float>(j + distance);
}

// The state of one tile and some heads: rows are (head, query).
struct TileState {
    float *q, *sums, *scores, *top, *total;
};

// Takes keys [key, key + n) of one cache block, the first of them at `block` (the offset of its row).
template <class T>
inline void attend_keys(const Attention& a, const Tile& tile, int64_t head, int64_t heads, const TileState& s,
                        int64_t key, int64_t n, int64_t offset) {
    const int64_t stride = a.kv_heads * a.dim, rows = heads * tile.count;
    const T *k = static_cast<const T*>(a.k_cache) + offset, *v = static_cast<const T*>(a.v_cache) + offset;
    dots<Widened<T>>(s.q, a.dim, rows, k, stride, n, a.dim, s.scores, kTileKeys);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = tile.position + r % tile.count;
        float* scores = s.scores + r * kTileKeys;
        const float slope = a.mask->alibi ? a.mask->alibi[head + r / tile.count] : 0.0f;
        bend(*a.mask, scores, n, slope, key - position);
        const int64_t to = most(0, least(n, position + 1 - key));
        const int64_t first = a.mask->window ? position + 1 - a.mask->window : 0;
        const int64_t from = least(to, most(0, first - key));
        const float factor = soften(scores, n, from, to, s.top[r], s.total[r]);
        if (factor != 1.0f) {
            float* sums = s.sums + r * a.dim;
            for (int64_t j = 0; j < a.dim; j += Vec::kWidth) {
                const int64_t count = least(a.dim - j, Vec::kWidth);
                (Vec::load(sums + j, count) * Vec::set(factor)).store(sums + j, count);
            }
        }
    }
    mix<T>(s.scores, kTileKeys, rows, v, stride, n, a.dim, s.sums, a.dim);
}

inline void begin_tile(const Attention& a, const Tile& tile, int64_t head, int64_t heads,
                       const TileState& s) {
    for (int64_t r = 0; r < heads * tile.count; ++r) {
        const int64_t h = head + r / tile.count, t = tile.token + r % tile.count;
        const float* q = a.q + t * a.q_stride + h * a.dim;
        for (int64_t j = 0; j < a.dim; ++j)
            s.q[r * a.dim + j] = q[j] * a.mask->scale;
        s.top[r] = kNothing;
        s.total[r] = 0.0f;
        if (a.mask->sinks) {
            read_row(a.mask->sinks, a.mask->sinks_dtype, h, s.top + r, 1);
            s.total[r] = 1.0f;
        }
    }
    std::memset(s.sums, 0, static_cast<size_t>(heads * tile.count * a.dim) * sizeof(float));
}

inline void end_tile(const Attention& a, const Tile& tile, int64_t head, int64_t heads, const TileState& s) {
    for (int64_t r = 0; r < heads * tile.count; ++r) {
        const int64_t h = head + r / tile.count, t = tile.token + r % tile.count;
        float* out = a.out + t * a.out_stride + h * a.dim;
        const float factor = 1.0f / s.total[r];
        for (int64_t j = 0; j < a.dim; ++j)
            out[j] = s.sums[r * a.dim + j] * factor;
        if (a.rounded)
            copy_row(out, a.rounded + t * a.out_stride + h * a.dim, a.dim);
    }
}

inline void attend_tile(const Attention& a, const Tile& tile, int64_t kv_head, int64_t head, int64_t heads,
                        float* scratch) {
    const TileState s = {scratch, scratch + kTileRows * a.dim, scratch + 2 * kTileRows * a.dim,
                         scratch + kTileRows * (2 * a.dim + kTileKeys),
                         scratch + kTileRows * (2 * a.dim + kTileKeys + 1)};
    begin_tile(a, tile, head, heads, s);
    const int64_t size = a.step->block_size, end = tile.position + tile.count;
    const int64_t first = a.mask->window ? most(0, tile.position + 1 - a.mask->window) : 0;
    const int32_t* table = a.step->block_table + tile.sequence * a.step->table_width;
    for (int64_t key = first; key < end;) {
        const int64_t within = key % size, n = least(least(size - within, kTileKeys), end - key);
        const int64_t offset = ((table[key / size] * size + within) * a.kv_heads + kv_head) * a.dim;
        with_dtype(a.cache_dtype, [&](auto* type) {
            using T = typename std::remove_pointer<decltype(type)>::type;
            attend_keys<T>(a, tile, head, heads, s, key, n, offset);
        });
        key += n;
    }
    end_tile(a, tile, head, heads, s);
}

// All tiles of a step, by the whole team.
inline void attend(const Attention& a, Team& team, float* scratch) {
    const int64_t group = a.heads / a.kv_heads, units = a.num_tiles * a.kv_heads;
    const int64_t longest = a.num_tiles < a.step->tokens ? kTileTokens : 1;
    const int64_t splits = most(ceil_div(2 * static_cast<int64_t>(team.size()), most(units, 1)), 1);
    const int64_t heads = most(1, least(ceil_div(group, splits), kTileRows / longest));
    const int64_t parts = ceil_div(group, heads);
    each(team, units * parts, 1, [&](int64_t begin, int64_t) {
        const int64_t part = begin % parts, kv_head = begin / parts % a.kv_heads;
        const int64_t head = kv_head * group + part * heads;
        attend_tile(a, a.tiles[begin / parts / a.kv_heads], kv_head, head, least(heads, group - part * heads),
                    scratch);
    });
}

} // namespace
} // namespace slipstream
