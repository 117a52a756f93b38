// Latent attention. A cache keeps one latent and one rotated key per token, from which the keys and values of
// all heads follow. Few queries per sequence are multiplied with the projection of the keys, and attend to
// the latents themselves; for many queries, keys and values are expanded. Source: DeepSeek-AI 2024 (arXiv
// 2405.04434), section 2.1.
#pragma once

namespace slipstream {
namespace {

// Whether keys and values of all heads are computed from the latents, rather than the latents attended to:
// where that takes fewer multiplications.
inline bool expands(const StackCall& call, const Latent& l) {
    const Step& s = call.step;
    if (!call.caches)
        return true;
    double older = 0.0, pairs = 0.0;
    for (int64_t n = 0; n < s.sequences; ++n) {
        const double queries = s.query_starts[n + 1] - s.query_starts[n], keys = s.kv_lens[n];
        older += keys - queries; // the queries' own latents are projected one way or the other
        pairs += queries * keys;
    }
    if (s.tokens <= s.sequences)
        return false;
    const double more =
        static_cast<double>(2 * l.rank - 2 * l.plain); // per pair, with values as wide as keys
    return older * static_cast<double>(l.rank * (l.plain + l.value)) <= pairs * most(more, 0.0);
}

// The heads that the attention of a block sees.
inline Heads heads_of(const StackCall& call, const Block& b) {
    if (!b.latent)
        return {b.heads, b.kv_heads, b.head_dim};
    if (expands(call, *b.latent))
        return {b.heads, b.heads, b.head_dim};
    return {b.heads, 1, b.latent->rank + b.latent->rotated};
}

class LatentAttention {
public:
    void take(Scratch& scratch, const StackCall& call, int threads) {
        const Step& s = call.step;
        int64_t queries = 0, shorts = 0, latents = 0, turned = 0, inputs = 0, both = 0;
        bool any = false, expanding = false;
        if (call.caches)
            for (int64_t n = 0; n < s.sequences; ++n)
                pages_ += ceil_div(s.kv_lens[n], s.block_size);
        for (int64_t i = 0; i < call.num_blocks; ++i) {
            const Block& b = call.blocks[i];
            if (!b.latent)
                continue;
            const Latent& l = *b.latent;
            const bool all = expands(call, l);
            any = true;
            expanding = expanding || all;
            queries = most(queries, b.heads * b.head_dim);
            shorts = most(shorts, l.query_down.outputs);
            latents = most(latents, l.rank + l.rotated);
            turned = most(turned, b.heads * (all ? b.head_dim : l.rank + l.rotated));
            inputs = most(most(inputs, b.hidden), most(l.query_down.outputs, l.rank));
            both = most(both, b.heads * (l.plain + l.value));
        }
        if (!any)
            return;
        const int64_t tokens = s.tokens, rounded = Vec::kBf16Dot ? tokens : 0;
        rows_ = !expanding ? 0 : call.caches ? pages_ * s.block_size : tokens;
        const int64_t rounded_rows = Vec::kBf16Dot ? rows_ : 0;
        queries_ = scratch.part<float>(tokens * queries);
        rounded_queries_ = scratch.part<Bf16>(rounded * queries);
        short_queries_ = scratch.part<float>(tokens * shorts);
        rounded_short_queries_ = scratch.part<Bf16>(rounded * shorts);
        latents_ = scratch.part<float>(tokens * latents);
        turned_ = scratch.part<float>(tokens * turned);
        attended_ = scratch.part<float>(tokens * turned);
        rounded_attended_ = scratch.part<Bf16>(rounded * turned);
        known_ = scratch.part<float>(rows_ * latents);
        rounded_known_ = scratch.part<Bf16>(rounded_rows * latents);
        expanded_ = scratch.part<float>(rows_ * both);
        keys_ = scratch.part<float>(rows_ * queries); // of any dtype
        values_ = scratch.part<float>(rows_ * queries);
        table_ = scratch.part<int32_t>(rows_ && call.caches ? s.sequences * s.table_width : 0);
        places_ = scratch.part<int32_t>(rows_ && call.caches ? pages_ : 0);
        room_.take(scratch, {most(tokens, rows_), inputs, kFewRows, inputs, 0}, threads);
    }

    // Computes the heads' outputs `(T, H * V)` of the inputs `normed` and `rounded`, `(T, C)`. The other
    // output is written where it is not null.
    void run(const StackCall& call, int64_t layer, const float* normed, const Bf16* rounded, float* joined,
             Bf16* rounded_joined, const AttentionRoom& room, Team& team, int rank) {
        const Block& b = call.blocks[layer];
        const Latent& l = *b.latent;
        if (rank == 0 && rows_ && call.caches)
            list_pages(call.step);
        const auto rows_for = [&](const Matrix& m, const float* full, const Bf16* some, int64_t width) {
            return Rows{full, rounds_rows(m, call.step.tokens) ? some : nullptr, width, call.step.tokens};
        };
        const bool is_short = l.query_down.outputs != 0;
        if (is_short)
            project(room_, rows_for(l.query_down, normed, rounded, b.hidden), l.query_down, short_queries_,
                    team, rank);
        project(room_, rows_for(l.down, normed, rounded, b.hidden), l.down, latents_, team, rank);
        each_one(team, call.step.tokens, [&](int64_t t) { keep(call, b, layer, t); });
        project(room_,
                is_short ? rows_for(b.qkv, short_queries_, rounded_short_queries_, l.query_down.outputs)
                         : rows_for(b.qkv, normed, rounded, b.hidden),
                b.qkv, queries_, team, rank);
        each_one(team, call.step.tokens, [&](int64_t t) { turn_query(call, b, t); });
        if (expands(call, l))
            attend_expanded(call, b, layer, joined, rounded_joined, room, team, rank);
        else
            attend_absorbed(call, b, layer, joined, rounded_joined, room, team, rank);
    }

private:
    // Norms the latents of one token, rotates its key, and writes both to the cache, if any.
    void keep(const StackCall& call, const Block& b, int64_t layer, int64_t t) const {
        const Latent& l = *b.latent;
        const int64_t width = l.rank + l.rotated;
        float* row = latents_ + t * width;
        if (l.query_down.outputs) {
            const int64_t n = l.query_down.outputs;
            norm_row(short_queries_ + t * n, short_queries_ + t * n, n, l.query_norm);
            if (rounds_rows(b.qkv, call.step.tokens))
                copy_row(short_queries_ + t * n, rounded_short_queries_ + t * n, n);
        }
        norm_row(row, row, l.rank, l.norm);
        scale_row(row, l.rank, l.latent_scale);
        turn(call, b, t, row + l.rank);
        if (call.caches)
            write_row(row, call.caches[layer].k, call.cache_dtype, call.step.slots[t] * width, width);
    }

    void turn_query(const StackCall& call, const Block& b, int64_t t) const {
        const int64_t width = b.heads * b.head_dim;
        float* row = queries_ + t * width;
        scale_row(row, width, b.latent->query_scale);
        for (int64_t h = 0; h < b.heads; ++h)
            turn(call, b, t, row + h * b.head_dim + b.latent->plain);
        if (Vec::kBf16Dot)
            copy_row(row, rounded_queries_ + t * width, width);
    }

    // Rotates the r rotated dims of a key or query of token t.
    static void turn(const StackCall& call, const Block& b, int64_t t, float* x) {
        const int64_t n = b.latent->rotated;
        if (b.latent->apart) {
            float odd[256];
            for (int64_t i = 0; i < n / 2; ++i) {
                odd[i] = x[2 * i + 1];
                x[i] = x[2 * i];
            }
            std::memcpy(x + n / 2, odd, static_cast<size_t>(n / 2) * sizeof(float));
        }
        if (b.table < 0)
            return;
        const Table& table = call.tables[b.table];
        const int64_t at = (call.positions ? call.positions[t] : t) * table.half;
        rotate_heads(x, 1, n, table.cos + at, table.sin + at, table.half, b.rope_interleaved);
    }

    static void scale_row(float* x, int64_t n, float factor) {
        for (int64_t j = 0; factor != 1.0f && j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            (Vec::load(x + j, count) * Vec::set(factor)).store(x + j, count);
        }
    }

    // One matrix per head, times each token's part of a row for that head.
    struct PerHead {
        const Matrix* matrices;
        const float* x;
        const Bf16* rounded;
        int64_t each, stride; // between heads, and between tokens
        float* out;
        int64_t out_each, out_stride;
    };
    void multiply_heads(const PerHead& p, int64_t heads, int64_t tokens, Team& team, int rank) const {
        const Matrix& first = p.matrices[0];
        const int64_t piece = grain(first, first.outputs, 1), pieces = ceil_div(first.outputs, piece);
        const int64_t groups = ceil_div(tokens, kFewRows);
        int64_t ready = -1;
        Operand in = {};
        each_in_runs(team, rank, heads * groups * pieces, 1, [&](int64_t task, int64_t) {
            const int64_t some = task / pieces, h = some / groups, t = some % groups * kFewRows;
            const Matrix& m = p.matrices[h];
            if (ready != some) {
                const int64_t count = least(kFewRows, tokens - t), at = t * p.stride + h * p.each;
                const Rows rows = {p.x + at, rounds(m, count) ? p.rounded + at : nullptr, p.stride, count};
                in = prepare(rows, m, room_.operands_of(rank));
                ready = some;
            }
            const int64_t begin = task % pieces * piece;
            multiply(in, m, begin, least(begin + piece, m.outputs),
                     p.out + t * p.out_stride + h * p.out_each + begin, p.out_stride);
        });
    }

    void attend_absorbed(const StackCall& call, const Block& b, int64_t layer, float* joined,
                         Bf16* rounded_joined, const AttentionRoom& room, Team& team, int rank) const {
        const Latent& l = *b.latent;
        const int64_t width = l.rank + l.rotated, all = b.heads * width, queries = b.heads * b.head_dim;
        const int64_t tokens = call.step.tokens, out = b.heads * l.value;
        each_one(team, tokens, [&](int64_t t) {
            for (int64_t h = 0; h < b.heads; ++h)
                std::memcpy(turned_ + t * all + h * width + l.rank,
                            queries_ + t * queries + h * b.head_dim + l.plain,
                            static_cast<size_t>(l.rotated) * sizeof(float));
        });
        multiply_heads({l.keys, queries_, rounded_queries_, b.head_dim, queries, turned_, width, all},
                       b.heads, tokens, team, rank);
        const Pages pages = pages_of(call.step);
        Attention a = upon_cache(heads_of(call, b), call.caches[layer], call.cache_dtype, pages, b.mask);
        a.q = {turned_, kFloat32, 0, all, width};
        a.out = {attended_, kFloat32, 0, all, width};
        a.rounded = Vec::kBf16Dot ? rounded_attended_ : nullptr;
        a.pairs = multiplies_pairs(call.dtype, call.cache_dtype);
        attend(a, team, rank, room);
        multiply_heads({l.values, attended_, rounded_attended_, width, all, joined, l.value, out}, b.heads,
                       tokens, team, rank);
        if (rounded_joined)
            each_one(team, tokens,
                     [&](int64_t t) { copy_row(joined + t * out, rounded_joined + t * out, out); });
    }

    // Numbers the pages that sequences use from 0 on.
    void list_pages(const Step& s) const {
        int32_t next = 0;
        for (int64_t n = 0; n < s.sequences; ++n)
            for (int64_t i = 0; i < ceil_div(s.kv_lens[n], s.block_size); ++i) {
                places_[next] = s.block_table[n * s.table_width + i];
                table_[n * s.table_width + i] = next++;
            }
    }

    // Reads the latent and the key of one known token: of this step, or of the cache's pages.
    void read_known(const StackCall& call, const Latent& l, int64_t layer, int64_t row, float* latent,
                    float* key) const {
        const int64_t width = l.rank + l.rotated, size = call.step.block_size;
        const void* from = latents_;
        int32_t dtype = kFloat32;
        int64_t at = row * width;
        if (call.caches) {
            from = call.caches[layer].k;
            dtype = call.cache_dtype;
            at = (places_[row / size] * size + row % size) * width;
        }
        read_row(from, dtype, at, latent, l.rank);
        read_row(from, dtype, at + l.rank, key, l.rotated);
    }

    void attend_expanded(const StackCall& call, const Block& b, int64_t layer, float* joined,
                         Bf16* rounded_joined, const AttentionRoom& room, Team& team, int rank) const {
        const Latent& l = *b.latent;
        const int64_t rows = rows_, all = b.heads * b.head_dim, out = b.heads * l.value;
        // The latents alone, adjacent; behind them the keys.
        float *shorts = known_, *rotated = known_ + rows * l.rank;
        const bool rounded = rounds_rows(l.up, rows);
        each_one(team, rows, [&](int64_t r) {
            read_known(call, l, layer, r, shorts + r * l.rank, rotated + r * l.rotated);
            if (rounded)
                copy_row(shorts + r * l.rank, rounded_known_ + r * l.rank, l.rank);
        });
        project(room_, {shorts, rounded ? rounded_known_ : nullptr, l.rank, rows}, l.up, expanded_, team,
                rank);
        const int32_t dtype = call.caches ? call.cache_dtype : call.dtype;
        each_one(team, rows, [&](int64_t r) { place_expanded(b, r, rotated + r * l.rotated, dtype); });
        Attention a = {};
        const Pages pages = {table_, call.step.table_width, call.step.block_size, false};
        a.heads = heads_of(call, b);
        a.k = {keys_, dtype, 0, all, b.head_dim};
        a.v = a.k;
        a.v.data = values_;
        a.pages = call.caches ? &pages : nullptr;
        a.mask = &b.mask;
        a.causal = b.causal != 0;
        a.q = {queries_, kFloat32, 0, all, b.head_dim};
        a.out = {attended_, kFloat32, 0, all, b.head_dim};
        a.pairs = multiplies_pairs(call.dtype, dtype);
        attend(a, team, rank, room);
        each_one(team, call.step.tokens, [&](int64_t t) {
            for (int64_t h = 0; h < b.heads; ++h)
                std::memcpy(joined + t * out + h * l.value, attended_ + t * all + h * b.head_dim,
                            static_cast<size_t>(l.value) * sizeof(float));
            if (rounded_joined)
                copy_row(joined + t * out, rounded_joined + t * out, out);
        });
    }

    // Writes the expanded keys and values of one token as the attention reads them: the values, which may be
    // narrower than the keys, end with zeros.
    void place_expanded(const Block& b, int64_t row, const float* rotated, int32_t dtype) const {
        const Latent& l = *b.latent;
        const int64_t both = l.plain + l.value;
        with_dtype(dtype, [&](auto* type) {
            using T = typename std::remove_pointer<decltype(type)>::type;
            T* keys = reinterpret_cast<T*>(keys_) + row * b.heads * b.head_dim;
            T* values = reinterpret_cast<T*>(values_) + row * b.heads * b.head_dim;
            const float* from = expanded_ + row * b.heads * both;
            for (int64_t h = 0; h < b.heads; ++h, from += both, keys += b.head_dim, values += b.head_dim) {
                copy_row(from, keys, l.plain);
                copy_row(rotated, keys + l.plain, l.rotated);
                copy_row(from + l.plain, values, l.value);
                std::memset(static_cast<void*>(values + l.value), 0,
                            static_cast<size_t>(b.head_dim - l.value) * sizeof(T));
            }
        });
    }

    float *queries_ = nullptr, *short_queries_ = nullptr, *latents_ = nullptr; // `(T, ...)`
    Bf16 *rounded_queries_ = nullptr, *rounded_short_queries_ = nullptr;
    float *turned_ = nullptr, *attended_ = nullptr; // queries and outputs of the attention
    Bf16* rounded_attended_ = nullptr;
    float *known_ = nullptr, *expanded_ = nullptr, *keys_ = nullptr, *values_ = nullptr; // of `rows_` tokens
    Bf16* rounded_known_ = nullptr;
    int32_t *table_ = nullptr,
            *places_ = nullptr; // pages of the expanded keys, and where they are in the cache
    int64_t pages_ = 0, rows_ = 0;
    ProductRoom room_;
};

} // namespace
} // namespace slipstream
