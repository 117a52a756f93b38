// Attention of heads with keys and values of their own, or with those of an earlier block: from the block's
// normed input to the heads' joined output.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

class HeadAttention {
public:
    void take(Scratch& scratch, const StackCall& call) {
        int64_t width = 0, values = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i) {
            const Block& b = call.blocks[i];
            if (!attends(b) || b.latent)
                continue;
            width = most(width, b.qkv.outputs);
            values = most(values, b.keys_values == kKeysAsValues ? b.kv_heads * b.head_dim : 0);
        }
        projected_ = scratch.part<float>(call.step.tokens * width);
        values_ = scratch.part<float>(call.step.tokens * values);
    }

    // Scratch for the projection of one row per token, as wide as the widest `qkv`.
    float* projected() const { return projected_; }

    // Writes the heads' output to `joined`, and rounded as well to `rounded` unless that is null.
    void run(const StackCall& call, int64_t layer, const Rows& x, float* joined, Bf16* rounded,
             const ProductRoom& products, AttentionRoom& room, Team& team, int rank,
             const Following& next) const {
        const Block& b = call.blocks[layer];
        const int64_t width = b.qkv.outputs, out = b.heads * b.head_dim, tokens = x.count;
        project(products, x, b.qkv, projected_, team, rank, next);
        // Copying past keys and values takes longer, so these items come first.
        const int64_t copies = call.step.past ? call.step.cache_blocks * b.kv_heads : 0;
        each(team, copies + tokens, ceil_div(copies + tokens, 2 * static_cast<int64_t>(team.size())),
             [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                     if (i < copies)
                         copy_past(call.caches[layer], call.cache_dtype, call.step, i, b.head_dim);
                     else
                         place(call, b, layer, i - copies, projected_ + (i - copies) * width);
             });
        const Pages pages = pages_of(call.step);
        const Heads heads = heads_of(call, b);
        Attention a = call.caches ? upon_cache(heads, call.caches[layer], call.cache_dtype, pages, b.mask)
                                  : within_rows(heads, projected_, width, b.mask, b.causal != 0);
        a.q = {projected_, kFloat32, 0, width, b.head_dim};
        a.out = {joined, kFloat32, 0, out, b.head_dim};
        a.rounded = b.gate ? nullptr : rounded;
        a.pairs = multiplies_pairs(call.dtype, call.caches ? call.cache_dtype : call.dtype);
        attend(a, team, rank, room);
        if (!b.gate)
            return;
        const int64_t gates = width - (b.gates_heads ? b.heads : out);
        each_one(team, tokens, [&](int64_t t) {
            open_heads(b.gate, b.gates_heads, joined + t * out, projected_ + t * width + gates, b.heads,
                       b.head_dim);
            if (rounded)
                copy_row(joined + t * out, rounded + t * out, out);
        });
    }

private:
    // Norms and rotates one token's queries and keys; writes its key and value to the cache, if any.
    void place(const StackCall& call, const Block& b, int64_t layer, int64_t t, float* q) const {
        const int64_t kv = b.kv_heads * b.head_dim;
        const bool borrows = b.keys_values == kBorrowed;
        float *k = q + b.heads * b.head_dim, *v = k + kv;
        if (b.keys_values == kKeysAsValues) {
            v = values_ + t * kv;
            std::memcpy(v, k, static_cast<size_t>(kv) * sizeof(float));
        }
        if (b.multipliers && !borrows)
            multiply_row(k, kv, b.multipliers->keys);
        auto norms = [&] {
            norm_heads(q, b.heads, b.head_dim, b.q_norm, b.qk_norm);
            if (!borrows)
                norm_heads(k, b.kv_heads, b.head_dim, b.k_norm, b.qk_norm);
        };
        if (!b.qk_norm_after_rope)
            norms();
        if (!borrows)
            norm_heads(v, b.kv_heads, b.head_dim, b.v_norm, kPerHead);
        if (b.clip != 0.0f) // only with own values, which follow the keys
            clip_row(q, (b.heads + 2 * b.kv_heads) * b.head_dim, b.clip);
        if (b.table >= 0) {
            const Table& table = call.tables[b.table];
            const int64_t row = (call.positions ? call.positions[t] : t) * table.half;
            const float *cos = table.cos + row, *sin = table.sin + row;
            rotate_heads(q, b.heads, b.head_dim, cos, sin, table.half, b.rope_interleaved);
            if (!borrows)
                rotate_heads(k, b.kv_heads, b.head_dim, cos, sin, table.half, b.rope_interleaved);
        }
        if (b.qk_norm_after_rope)
            norms();
        if (b.growth != 0.0f)
            multiply_row(q, b.heads * b.head_dim, growth(b, call.places[t]));
        if (call.caches && !borrows)
            write_cache(call.caches[layer], call.cache_dtype, heads_of(call, b), call.step, t, k, v);
    }

    static float growth(const Block& b, int64_t position) {
        const float steps = std::floor((static_cast<float>(position) + b.growth_offset) / b.growth_period);
        return 1.0f + b.growth * std::log1p(steps);
    }

    float *projected_ = nullptr, *values_ = nullptr;
};

} // namespace
} // namespace slipstream
