// The arithmetic of attention on one tile: some rows (queries of heads that share a kv head) against
// kTileKeys keys. Keys and values are packed once into the layout of the products, and used by all rows.
//
// A slot is 32 bits along the reduction dimension: one float, or a pair of bfloat16. Rows of queries and of
// weights have `depth` slots. Packed keys are `[slot of dims][kTileKeys]` slots, packed values `[slot of
// keys][width]` slots, which is also the layout that the bfloat16 tiles of AMX read.
//
// Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; Dao et al. 2022 (arXiv 2205.14135),
// algorithm 1.
#pragma once

namespace slipstream {
namespace {

// Sums are loaded and stored once per tile. Compared with 128 keys, 64 take 1.03 to 1.08 times as long at 40
// to 128 dims. 256 take 0.96 of the time, but do not fit into small second-level caches, nor into the first
// level together with AMX tiles.
#if defined(SLIPSTREAM_AMX)
constexpr int64_t kTileKeys = 128;
#else
constexpr int64_t kTileKeys = Vec::kWidth == 16 ? 256 : 128;
#endif
constexpr int64_t kFewKeys = 64;       // for few rows, which multiply with keys in place
constexpr int64_t kMostStripRows = 16; // maximum rows whose scores exist at a time
constexpr int64_t kMostPadding = 16;   // maximum slots that are added to a row as padding
constexpr float kNothing = -3.0e38f;   // below every score; the difference of two of them is not NaN
// The score of a key that a mask hides with the lowest finite number: in a row with no other keys, all such
// keys weigh the same.
constexpr float kHidden = -3.4e38f;
constexpr float kGreatest = 3.40282347e38f;    // largest finite number
constexpr float kNever = -__builtin_inff();    // score of a key that has no weight at all
constexpr float kLog2E = 1.44269504088896341f; // scores are in units of ln 2: weights are powers of two

// The multiply-add of products of slots: `add` is one step.
struct FloatSum {
    static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};
#ifdef SLIPSTREAM_BF16_DOT
struct PairSum {
    static Vec add(Vec sum, Vec a, Vec b) { return dot_pairs(sum, a, b); }
};
#endif

// Pack keys `rows[0, n)` of `dim` elements each, transposed: slot s of key j goes to `to[s * kTileKeys + j]`.
// Keys are padded with zeros to a whole vector.
template <class P, class T>
inline void pack_keys(const T* const* rows, int64_t n, int64_t dim, float* to) {
    constexpr int64_t kWidth = Vec::kWidth, kElements = P::kDepth * kWidth;
    for (int64_t j = 0; j < n; j += kWidth)
        for (int64_t d = 0; d < dim; d += kElements) {
            const int64_t count = least(dim - d, kElements);
            Vec v[kWidth];
#pragma GCC unroll 16
            for (int64_t i = 0; i < kWidth; ++i)
                v[i] = j + i < n ? P::along(rows[j + i] + d, count) : Vec::set(0);
            transpose(v);
            float* at = to + d / P::kDepth * kTileKeys + j;
            for (int64_t i = 0; i < ceil_div(count, P::kDepth); ++i)
                v[i].store(at + i * kTileKeys);
        }
}

// Pack values `rows[0, n)`: slot s of column d goes to `to[s * width + d]`; columns from `dim` to `width`
// become zero.
template <class P, class T>
inline void pack_values(const T* const* rows, int64_t n, int64_t dim, int64_t width, float* to) {
    for (int64_t j = 0; j < n; j += P::kDepth, to += width) {
        const T *p = rows[j], *q = j + 1 < n ? rows[j + 1] : nullptr;
        for (int64_t d = 0; d < width; d += Vec::kWidth)
            P::across(p + d, q ? q + d : q, least(dim - d, Vec::kWidth)).store(to + d);
    }
}

// out[r][j] (+)= sum over slots k of a[r][k] * b[k][j], for R rows and C vectors of columns.
template <class P, bool kAdd, int R, int C>
inline void product_block(const float* a, int64_t as, const float* b, int64_t bs, int64_t depth, float* out,
                          int64_t os) {
    Vec sums[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[r][c] = kAdd ? Vec::load(out + r * os + c * Vec::kWidth) : Vec::set(0);
    for (int64_t k = 0; k < depth; ++k, b += bs) {
        Vec columns[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            columns[c] = Vec::load(b + c * Vec::kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec factor = Vec::repeat(a + r * as + k);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                sums[r][c] = P::add(sums[r][c], factor, columns[c]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[r][c].store(out + r * os + c * Vec::kWidth);
}

template <class P, bool kAdd, int R>
inline void product_rows(const float* a, int64_t as, const float* b, int64_t bs, int64_t depth, int64_t width,
                         float* out, int64_t os) {
    constexpr int64_t kWide = Vec::kCols * Vec::kWidth;
    int64_t j = 0;
    for (; j + kWide <= width; j += kWide)
        product_block<P, kAdd, R, Vec::kCols>(a, as, b + j, bs, depth, out + j, os);
    if (Vec::kCols > 2 && j + 2 * Vec::kWidth <= width) {
        product_block<P, kAdd, R, 2>(a, as, b + j, bs, depth, out + j, os);
        j += 2 * Vec::kWidth;
    }
    for (; j < width; j += Vec::kWidth)
        product_block<P, kAdd, R, 1>(a, as, b + j, bs, depth, out + j, os);
}

// `product_block` for twice as many rows and the remaining columns, fewer than a block has: with the rows of
// one block there would be too few independent sums to hide the latency.
template <class P, bool kAdd>
inline void product_narrow(const float* a, int64_t as, const float* b, int64_t bs, int64_t depth,
                           int64_t width, float* out, int64_t os) {
    constexpr int kRows = 2 * Vec::kRows;
    if (Vec::kCols > 3 && width == 3 * Vec::kWidth)
        return product_block<P, kAdd, kRows, least(Vec::kCols, 3)>(a, as, b, bs, depth, out, os);
    if (Vec::kCols > 2 && width == 2 * Vec::kWidth)
        return product_block<P, kAdd, kRows, 2>(a, as, b, bs, depth, out, os);
    product_block<P, kAdd, kRows, 1>(a, as, b, bs, depth, out, os);
}

// The product for any number of rows and whole vectors of columns.
template <class P, bool kAdd>
inline void product(const float* a, int64_t as, int64_t rows, const float* b, int64_t bs, int64_t depth,
                    int64_t width, float* out, int64_t os) {
    constexpr int64_t kWide = Vec::kCols * Vec::kWidth;
    if (const int64_t narrow = width % kWide; narrow && rows == 2 * Vec::kRows) {
        product_narrow<P, kAdd>(a, as, b + width - narrow, bs, depth, narrow, out + width - narrow, os);
        width -= narrow;
    }
    int64_t r = 0;
    for (; r + Vec::kRows <= rows; r += Vec::kRows)
        product_rows<P, kAdd, Vec::kRows>(a + r * as, as, b, bs, depth, width, out + r * os, os);
    if (Vec::kRows > 3 && rows - r == 3)
        product_rows<P, kAdd, 3>(a + r * as, as, b, bs, depth, width, out + r * os, os);
    else if (Vec::kRows > 2 && rows - r == 2)
        product_rows<P, kAdd, 2>(a + r * as, as, b, bs, depth, width, out + r * os, os);
    else if (rows - r == 1)
        product_rows<P, kAdd, 1>(a + r * as, as, b, bs, depth, width, out + r * os, os);
}

// A multiplication policy: what a slot holds, how it is filled, and the product of rows of slots.
//
// Sum         the multiply-add of slots
// kDepth      elements in a slot
// kSlots      a reduction depth is padded with zeros to a multiple of this many slots
// kKeys       products start and end at multiples of this many keys
// kStripRows  rows whose scores exist at a time; `a`, and without kAdd `out`, always has room for all of them
// kTerms      of the polynomial in `power`
// Session     exists while a thread multiplies
struct FloatSlots {
    struct Session {};
    using Sum = FloatSum;
    static constexpr int64_t kDepth = 1, kSlots = 1, kKeys = Vec::kWidth, kStripRows = 2 * Vec::kRows;
    static constexpr int kTerms = 7;
    template <class T>
    static Vec along(const T* p, int64_t n) {
        return n == Vec::kWidth ? Vec::load(p) : Vec::load(p, n);
    }
    template <class T>
    static Vec across(const T* p, const T*, int64_t n) {
        return along(p, n);
    }
    template <class T, int C>
    static void across(const T* p, const T*, Vec (&v)[C]) {
        for (int c = 0; c < C; ++c)
            v[c] = Vec::load(p + c * Vec::kWidth);
    }
    static void store(Vec v, float* to, int64_t at) { v.store(to + at); }
    template <bool kAdd>
    static void multiply(const float* a, int64_t as, int64_t rows, const float* b, int64_t bs, int64_t depth,
                         int64_t width, float* out, int64_t os) {
        product<FloatSum, kAdd>(a, as, rows, b, bs, depth, width, out, os);
    }
};

#ifdef SLIPSTREAM_BF16_DOT
// Pairs rounded to bfloat16, accumulated in float32.
struct PairSlots {
    struct Session {};
    using Sum = PairSum;
    static constexpr int64_t kDepth = 2, kSlots = 1, kKeys = Vec::kWidth, kStripRows = 2 * Vec::kRows;
    static constexpr int kTerms = 4;
    template <class T>
    static Vec along(const T* p, int64_t n) {
        return pairs_along(p, n);
    }
    template <class T>
    static Vec across(const T* p, const T* q, int64_t n) {
        return pairs_across(p, q, n);
    }
    template <class T, int C>
    static void across(const T* p, const T* q, Vec (&v)[C]) {
        pairs_across(p, q, v);
    }
    static void store(Vec v, float* to, int64_t at) { v.store(reinterpret_cast<Bf16*>(to) + at); }
    template <bool kAdd>
    static void multiply(const float* a, int64_t as, int64_t rows, const float* b, int64_t bs, int64_t depth,
                         int64_t width, float* out, int64_t os) {
        product<PairSum, kAdd>(a, as, rows, b, bs, depth, width, out, os);
    }
};
#endif

// Return 2^x for x <= 0, and 2^-100 for x below -100: negligible beside a weight of 1, but well above where
// products of bfloat16 are flushed to zero, so that a row that hides all keys equally yields their mean. NaN
// stays NaN. With 7 terms the relative error is below 2e-7; with 4 it is below 8e-5, which is small compared
// with the rounding to bfloat16.
// Source: Cephes exp2f (Moshier); Remez' algorithm for the 4 terms.
template <int kTerms>
inline Vec power(Vec x) {
    const Vec bounded = max(Vec::set(-100.0f), x), n = round(bounded), r = bounded - n;
    if constexpr (kTerms == 4) {
        Vec p = Vec::set(5.517167e-2f);
        p = fma(p, r, Vec::set(2.4261112e-1f));
        p = fma(p, r, Vec::set(6.9326099e-1f));
        return times_power_of_two(fma(p, r, Vec::set(9.9992807e-1f)), n);
    }
    Vec p = Vec::set(1.535336188319500e-4f);
    p = fma(p, r, Vec::set(1.339887440266574e-3f));
    p = fma(p, r, Vec::set(9.618437357674640e-3f));
    p = fma(p, r, Vec::set(5.550332471162809e-2f));
    p = fma(p, r, Vec::set(2.402264791363012e-1f));
    p = fma(p, r, Vec::set(6.931472028550421e-1f));
    return times_power_of_two(fma(p, r, Vec::set(1.0f)), n);
}

inline float power(float x) {
    return power<7>(Vec::set(x)).sum() / Vec::kWidth;
}

alignas(64) constexpr float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// How the raw scores of a row are transformed.
struct Bend {
    float scale, softcap;  // softcap 0: none
    float slope, distance; // slope * (j + distance) is added to the score of key j
    const float* k_scales; // multiplied with the scores, per key; or null
    const float* v_scales; // multiplied with the weights once they are summed, per key; or null
    const float* bias;     // added to the scores; or null
};

// The keys of a strip, [low, high) in whole vectors, and those that one row of it sees, [from, to).
struct Seen {
    int64_t low, high, from, to;
};

// Whether raw scores only need a positive scale, and no key of the range is hidden.
inline bool is_plain(const Bend& b, const Seen& keys) {
    return keys.from <= keys.low && keys.high <= keys.to && b.scale > 0.0f && b.softcap == 0.0f &&
           b.slope == 0.0f && !b.k_scales && !b.bias;
}

inline float highest_of(const float* scores, const Seen& keys) {
    Vec highest = Vec::load(scores + keys.low);
    for (int64_t j = keys.low + Vec::kWidth; j < keys.high; j += Vec::kWidth)
        highest = max(Vec::load(scores + j), highest);
    return highest.highest();
}

// Return x where its index is in [from, to) and `other` elsewhere; lane 0 has index j.
inline Vec within(Vec x, int64_t j, int64_t from, int64_t to, Vec other) {
    const Vec index = Vec::load(kCount) + Vec::set(static_cast<float>(j));
    x = if_less(index, Vec::set(static_cast<float>(from)), other, x);
    return if_less(index, Vec::set(static_cast<float>(to)), x, other);
}

// Transform raw scores into scores in units of ln 2, and hide those that the row does not see; return the
// highest of the others.
inline float bend(const Bend& b, float* scores, const Seen& keys) {
    const Vec count = Vec::load(kCount), hidden = Vec::set(kHidden);
    Vec highest = hidden;
    for (int64_t j = keys.low; j < keys.high; j += Vec::kWidth) {
        Vec s = Vec::load(scores + j) * Vec::set(b.scale);
        if (b.k_scales)
            s = s * Vec::load(b.k_scales + j);
        if (b.softcap != 0.0f)
            s = Vec::set(b.softcap) * tangent(s);
        if (b.slope != 0.0f)
            s = fma(count + Vec::set(static_cast<float>(j) + b.distance), Vec::set(b.slope), s);
        if (b.bias)
            s = s + Vec::load(b.bias + j);
        if (j < keys.from || j + Vec::kWidth > keys.to)
            s = within(s, j, keys.from, keys.to, hidden);
        s.store(scores + j);
        highest = max(s, highest);
    }
    return highest.highest();
}

// Turn scores into weights 2^(scale * score - top), stored as rows of slots, and add their sum to `total`,
// lane by lane. Keys that the row does not see, or with score kNever, get weight 0. The product is rounded
// before the subtraction, as it was for `top`: a fused multiply-add would differ by the rounding error, which
// exceeds 2^7 for scores from 2^31 on.
template <class P>
inline void weigh(const Bend& b, const float* scores, float scale, const Seen& keys, float top,
                  float* weights, float* total) {
    const Vec factor = Vec::set(scale), below = Vec::set(-top);
    Vec sum = Vec::load(total);
    for (int64_t j = keys.low; j < keys.high; j += Vec::kWidth) {
        const Vec s = Vec::load(scores + j);
        Vec p = power<P::kTerms>(s * factor + below);
        if (b.bias)
            p = if_less(s, Vec::set(-kGreatest), Vec::set(0), p);
        if (j < keys.from || j + Vec::kWidth > keys.to)
            p = within(p, j, keys.from, keys.to, Vec::set(0));
        sum = sum + p;
        if (b.v_scales)
            p = p * Vec::load(b.v_scales + j);
        P::store(p, weights, j);
    }
    sum.store(total);
}

inline void scale_all(float* x, Vec factor, int64_t width) {
    for (int64_t j = 0; j < width; j += Vec::kWidth)
        (Vec::load(x + j) * factor).store(x + j);
}

// The raw scores of one row that only need a positive scale. The row sees the first `end` of n keys; n is a
// whole number of vectors.
struct PlainRow {
    float* scores;
    int64_t end, n;
    float scale;

    int64_t whole() const { return end / Vec::kWidth * Vec::kWidth; }
    // Hide what the row does not see; return the highest other score, scaled, or kNothing if there is none.
    float highest() const {
        if (end == 0)
            return kNothing;
        for (int64_t j = whole(); j < n; j += Vec::kWidth)
            within(Vec::load(scores + j), j, 0, end, Vec::set(kHidden)).store(scores + j);
        return scale * highest_of(scores, {0, n, 0, end});
    }
};

// Turn the scores of such a row into weights, and update `top`, `total` and `sums`, given the row's highest
// score; keys that it does not see get weight 0.
template <class P>
inline void weigh_plain(const PlainRow& row, float high, float* weights, float* top, float* total,
                        float* sums, int64_t width) {
    const int64_t end = row.end, n = row.n, whole = row.whole();
    const float* scores = row.scores;
    if (end == 0) {
        for (int64_t j = 0; j < n; j += Vec::kWidth)
            P::store(Vec::set(0), weights, j);
        return;
    }
    Vec sum = Vec::load(total);
    if (high > *top) {
        if (*top > kNothing) { // before the first keys there is nothing to rescale
            const Vec factor = power<7>(Vec::set(*top - high));
            sum = sum * factor;
            scale_all(sums, factor, width);
        }
        *top = high;
    }
    const Vec factor = Vec::set(row.scale), below = Vec::set(-*top);
    int64_t j = 0;
    for (; j < whole; j += Vec::kWidth) {
        const Vec p = power<P::kTerms>(Vec::load(scores + j) * factor + below);
        sum = sum + p;
        P::store(p, weights, j);
    }
    for (; j < n; j += Vec::kWidth) {
        const Vec p = power<P::kTerms>(Vec::load(scores + j) * factor + below);
        const Vec seen = within(p, j, 0, end, Vec::set(0));
        sum = sum + seen;
        P::store(seen, weights, j);
    }
    sum.store(total);
}

} // namespace
} // namespace slipstream
