// The arithmetic of attention on one tile: some rows (queries of heads that share a kv head) against
// kTileKeys keys. Keys and values are brought once into the layout that the products want, and serve all
// rows.
//
// A slot is 32 bits along the products' depth: one float, or a pair of bfloat16. Rows of queries and of
// weights are `depth` slots. Packed keys are `[slot of dims][kTileKeys]` slots, packed values
// `[slot of keys][width]` slots: what the bfloat16 tiles of AMX read as well.
//
// Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; Dao et al. 2022 (arXiv 2205.14135),
// algorithm 1.
#pragma once

namespace slipstream {
namespace {

// Sums are fetched and put back once for each tile: beside 128 keys, 64 take 1.03 to 1.08 of the time at 40
// to 128 dims, and 256 take 0.96, for which small second caches have no room, nor the first one beside tiles
// of AMX.
#if defined(SLIPSTREAM_AMX)
constexpr int64_t kTileKeys = 128;
#else
constexpr int64_t kTileKeys = Vec::kWidth == 16 ? 256 : 128;
#endif
constexpr int64_t kFewKeys = 64;       // where a few rows meet them as they lie
constexpr int64_t kMostStripRows = 16; // rows whose scores exist at a time
constexpr int64_t kMostPadding = 16;   // slots that a row may be padded to
constexpr float kNothing = -3.0e38f;   // below every score; the difference of two of them is no NaN
// What a mask says with the lowest number scores this: where a row has nothing else, such keys count alike.
constexpr float kHidden = -3.4e38f;
constexpr float kGreatest = 3.40282347e38f;    // finite
constexpr float kNever = -__builtin_inff();    // no weight at all
constexpr float kLog2E = 1.44269504088896341f; // scores are kept in units of ln 2: weights are powers of two

// What products of slots are made of; `add` is one step of them.
struct FloatSum {
    static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};
#ifdef SLIPSTREAM_BF16_DOT
struct PairSum {
    static Vec add(Vec sum, Vec a, Vec b) { return dot_pairs(sum, a, b); }
};
#endif

// Keys in rows `rows[0, n)` of `dim` elements each, turned: slot s of key j to `to[s * kTileKeys + j]`. Keys
// up to the next whole vector become zeros.
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

// Values in rows `rows[0, n)`: slot s of column d to `to[s * width + d]`, columns up to `width` zeros.
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

// The same for twice as many rows and fewer columns than a block has: with the rows of one block alone each
// sum would wait for the one before.
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

// The same for any rows and a whole number of vectors of columns.
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

// One way to multiply: what a slot holds, how it is filled, and the product of rows of slots.
//
// Sum         of products of slots
// kDepth      elements in a slot
// kSlots      slots that a depth is padded to, with zeros
// kKeys       keys that products begin and end at
// kStripRows  rows whose scores exist at a time; of `a` and, where nothing is added, of `out` all are there
// kTerms      of the polynomial in `power`
// Session     lives while a thread multiplies
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
// Pairs rounded to bfloat16, summed in float32.
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

// 2^x for x <= 0, and 2^-100 below that: nothing beside a weight of 1, and yet far from where products of
// bfloat16 are flushed to zero, so that rows which hide every key alike have a mean. A NaN stays one. With 7
// terms the relative error is below 2e-7, with 4 below 8e-5, which is little beside the rounding to bfloat16.
// Source: Cephes exp2f (Moshier); of the 4 terms Remez' algorithm.
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

// What one row makes of its raw scores.
struct Bend {
    float scale, softcap;  // softcap 0: none
    float slope, distance; // slope * (j + distance) is added to the score of key j
    const float* k_scales; // multiply the scores, key by key; or null
    const float* v_scales; // multiply the weights after they are summed; or null
    const float* bias;     // added, or null
};

// The keys of a strip, [low, high) by whole vectors, and of one row of it, [from, to).
struct Seen {
    int64_t low, high, from, to;
};

// Whether raw scores need nothing but a positive scale, and no key of the range is hidden.
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

// x where its place is in [from, to), `other` elsewhere; its first lane is at j.
inline Vec within(Vec x, int64_t j, int64_t from, int64_t to, Vec other) {
    const Vec index = Vec::load(kCount) + Vec::set(static_cast<float>(j));
    x = if_less(index, Vec::set(static_cast<float>(from)), other, x);
    return if_less(index, Vec::set(static_cast<float>(to)), x, other);
}

// Raw scores become scores in units of ln 2; returns the highest of those that the row sees, the others are
// hidden.
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

// Scores become weights 2^(scale * score - top), stored as rows of slots; their sum is added to `total`, lane
// by lane. Keys that the row does not see, or never, weigh nothing. Products are rounded as that of the top
// was: a sum in one step would be off by what rounding left, which is above 2^7 from scores of 2^31 on.
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

// Raw scores of one row that need nothing but a positive scale; it sees the first `end` of n keys, a whole
// number of vectors.
struct PlainRow {
    float* scores;
    int64_t end, n;
    float scale;

    int64_t whole() const { return end / Vec::kWidth * Vec::kWidth; }
    // Hides what the row does not see; the highest of the others, scaled, or kNothing.
    float highest() const {
        if (end == 0)
            return kNothing;
        for (int64_t j = whole(); j < n; j += Vec::kWidth)
            within(Vec::load(scores + j), j, 0, end, Vec::set(kHidden)).store(scores + j);
        return scale * highest_of(scores, {0, n, 0, end});
    }
};

// All of that for such a row once its highest score is known; keys that it does not see weigh nothing.
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
        if (*top > kNothing) { // before the first keys there is nothing to scale
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
