// The operands of attention: rows of queries, keys and values, plain or in the pages of a cache.
#pragma once

namespace slipstream {
namespace {

// Rows of heads of `dim` contiguous elements each: token t, head h of sequence n starts at data + n *
// sequence + t * token + h * head. Packed tokens are numbered across all sequences.
struct View {
    const void* data;
    int32_t dtype;
    int64_t sequence, token, head;
};

// Paged keys and values: token t of sequence n is in page table[n * table_width + t / block_size].
struct Pages {
    const int32_t* table;
    int64_t table_width, block_size;
    bool heads_first; // within a page, all tokens of a head are contiguous: `(K, Z, D)`
};

// What is added to the score of (n, h, query, key), data[n * sequence + h * head + query * token + key]: a
// floating dtype, or kBoolean, where zero hides the key.
using Scores = View;

// One attention call: over a cache (`upon_cache`), within packed sequences (`within_rows`), or over an
// encoder's states (`to_states`).
struct Attention {
    Heads heads;
    View q, k, v;
    View out;                         // written
    Bf16* rounded;                    // a second output, in bfloat16 with the strides of `out`; or null
    const Pages* pages;               // of k and v; null: plain rows
    const float *k_scales, *v_scales; // `(P, Z, K)`, for int8 keys and values; otherwise null
    const Mask* mask;
    const Scores* bias; // or null
    bool causal;
    bool pairs; // multiply pairs of bfloat16 where the processor can; wider operands are rounded
};

// Return the sequences of a step: over a paged cache, or packed side by side without one.
inline Spans spans_of(const Step& step, bool cached = true, bool causal = true) {
    return {step.sequences, step.query_starts, step.kv_lens, 0, 0, causal, !cached, nullptr};
}
// Every token sees all states of an encoder, or the first `seen`.
inline Spans spans_across(const Step& step, const Across& across) {
    return {step.sequences, step.query_starts, across.seen, 0, across.states, false, false, nullptr};
}
inline Pages pages_of(const Step& step) {
    return {step.block_table, step.table_width, step.block_size, step.heads_first != 0};
}
// Attention over a layer's cache; the caller sets `q`, `out` and `pairs`.
inline Attention upon_cache(const Heads& heads, const Cache& cache, int32_t dtype, const Pages& pages,
                            const Mask& mask) {
    Attention a = {};
    a.heads = heads;
    a.k = {cache.k, dtype, 0, heads.kv_heads * heads.dim, heads.dim};
    if (pages.heads_first) {
        a.k.token = heads.dim;
        a.k.head = pages.block_size * heads.dim;
    }
    a.v = a.k;
    a.v.data = cache.v;
    a.k_scales = cache.k_scales;
    a.v_scales = cache.v_scales;
    a.pages = &pages;
    a.mask = &mask;
    a.causal = true;
    return a;
}

// Attention within packed sequences without a cache: each row of `qkv` holds a token's query, key and value
// heads side by side, and takes `width` numbers. The caller sets `out` and `pairs`.
inline Attention within_rows(const Heads& heads, const float* qkv, int64_t width, const Mask& mask,
                             bool causal) {
    const int64_t q = heads.heads * heads.dim, kv = heads.kv_heads * heads.dim;
    Attention a = {};
    a.heads = heads;
    a.q = {qkv, kFloat32, 0, width, heads.dim};
    a.k = a.v = a.q;
    a.k.data = qkv + q;
    a.v.data = qkv + q + kv;
    a.mask = &mask;
    a.causal = causal;
    return a;
}

// Cross-attention to an encoder's states; the caller sets `q`, `out` and `pairs`.
inline Attention to_states(const Heads& heads, const Across& across) {
    Attention a = {};
    a.heads = heads;
    a.k = {across.k, across.dtype, heads.kv_heads * across.states * heads.dim, heads.dim,
           across.states * heads.dim};
    a.v = a.k;
    a.v.data = across.v;
    a.mask = &across.mask;
    return a;
}

// Whether products are computed in bfloat16: if the keys are stored in it, or are int8 codes and the call's
// dtype is bfloat16.
inline bool multiplies_pairs(int32_t dtype, int32_t cache_dtype) {
    return Vec::kBf16Dot && (cache_dtype == kBfloat16 || (cache_dtype == kInt8Codes && dtype == kBfloat16));
}

// Quantize one head to int8 codes from -127 to 127 and return their scale: 0 for a row of zeros, NaN for a
// row with NaN or infinity.
inline float quantize_row(const float* x, int8_t* codes, int64_t n) {
    Vec widest = Vec::set(0), odd = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const Vec v = Vec::load(x + j, least(n - j, Vec::kWidth));
        widest = max(abs(v), widest);
        odd = fma(v, Vec::set(0), odd); // `max` passes NaN over
    }
    const float scale = widest.highest() / 127.0f + odd.sum();
    const bool normal = scale >= std::numeric_limits<float>::min() &&
                        scale <= std::numeric_limits<float>::max(); // the inverse of others may be infinite
    const Vec inverse = Vec::set(normal ? 1.0f / scale : 0.0f);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        float rounded[Vec::kWidth];
        round(Vec::load(x + j, count) * inverse).store(rounded);
        for (int64_t i = 0; i < count; ++i)
            codes[j + i] = normal ? static_cast<int8_t>(rounded[i]) : int8_t{0};
    }
    return scale;
}

// Copy the past of one kv head in one page to the start of the page; `row` is its index in `(P, K)`.
inline void copy_past(const Cache& cache, int32_t dtype, const Step& step, int64_t row, int64_t dim) {
    const int64_t item = dim * (dtype == kFloat32 ? 4 : 2), size = step.past * item;
    const int64_t to = row * step.block_size * item, from = row * size;
    std::memcpy(static_cast<char*>(cache.k) + to, static_cast<const char*>(cache.past_k) + from,
                static_cast<size_t>(size));
    std::memcpy(static_cast<char*>(cache.v) + to, static_cast<const char*>(cache.past_v) + from,
                static_cast<size_t>(size));
}

// Write the key and the value of token t, `(K, D)` each, into its slot of the cache.
inline void write_cache(const Cache& cache, int32_t dtype, const Heads& heads, const Step& step, int64_t t,
                        const float* k, const float* v) {
    const int64_t width = heads.kv_heads * heads.dim, slot = step.slots[t];
    if (step.heads_first) {
        const int64_t first = slot / step.block_size * heads.kv_heads, within = slot % step.block_size;
        for (int64_t h = 0; h < heads.kv_heads; ++h) {
            const int64_t at = ((first + h) * step.block_size + within) * heads.dim;
            write_row(k + h * heads.dim, cache.k, dtype, at, heads.dim);
            write_row(v + h * heads.dim, cache.v, dtype, at, heads.dim);
        }
        return;
    }
    if (dtype != kInt8Codes) {
        write_row(k, cache.k, dtype, slot * width, width);
        write_row(v, cache.v, dtype, slot * width, width);
        return;
    }
    for (int64_t h = 0; h < heads.kv_heads; ++h) {
        const int64_t row = slot * heads.kv_heads + h, at = h * heads.dim;
        cache.k_scales[row] =
            quantize_row(k + at, static_cast<int8_t*>(cache.k) + row * heads.dim, heads.dim);
        cache.v_scales[row] =
            quantize_row(v + at, static_cast<int8_t*>(cache.v) + row * heads.dim, heads.dim);
    }
}

// Call `f` with a null pointer of the type in which keys are stored.
template <class F>
inline void with_key_dtype(int32_t dtype, F f) {
    if (dtype == kInt8Codes)
        f(static_cast<int8_t*>(nullptr));
    else
        with_dtype(dtype, f);
}

} // namespace
} // namespace slipstream
