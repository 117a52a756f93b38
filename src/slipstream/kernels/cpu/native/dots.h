// `dots`: rows times a dense matrix whose inputs are contiguous.
//
// Weights are prefetched into L2, because L1 has few slots for outstanding loads from memory. One thread of a
// Zen 5 reads cold bfloat16 weights at 16 to 20 GB/s this way with one row and at 14 with eight rows; when
// prefetching into L1, at 12 to 17 and 9.
//
// Source: register blocking as in Goto and van de Geijn 2008 (ACM TOMS 34:3), section 6, without packing.
#pragma once

namespace slipstream {
namespace {

// Products of float32 rows with weights of any storage type, in float32.
template <class T>
struct Widened {
    using X = float;
    using W = T;
    static constexpr int kStep = Vec::kWidth;
    static Vec x(const X* p) { return Vec::load(p); }
    static Vec x(const X* p, int64_t n) { return Vec::load(p, n); }
    static Vec w(const W* p) { return Vec::load(p); }
    static Vec w(const W* p, int64_t n) { return Vec::load(p, n); }
    static Vec add(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
};

#ifdef SLIPSTREAM_BF16_DOT
// Products of rows rounded to bfloat16 with bfloat16 weights, summed in float32: two products per lane at
// once.
struct Bf16Pairs {
    using X = Bf16;
    using W = Bf16;
    static constexpr int kStep = 2 * Vec::kWidth;
    static Bf16Lanes x(const X* p) { return Bf16Lanes::load(p); }
    static Bf16Lanes x(const X* p, int64_t n) { return Bf16Lanes::load(p, n); }
    static Bf16Lanes w(const W* p) { return Bf16Lanes::load(p); }
    static Bf16Lanes w(const W* p, int64_t n) { return Bf16Lanes::load(p, n); }
    static Vec add(Vec sum, Bf16Lanes x, Bf16Lanes w) { return dot(sum, x, w); }
};
#endif

// Products of a parted row (see Operand) with bfloat16 weights. The two weights in a 32-bit word are widened
// by one instruction each, where weights in order take several.
struct Parted {
    using X = float;
    using W = Bf16;
    struct Two {
        Vec even, odd;
    };
    static constexpr int kStep = 2 * Vec::kWidth;
    static Two x(const X* p) { return {Vec::load(p), Vec::load(p + Vec::kWidth)}; }
    static Two x(const X* p, int64_t) { return x(p); }
    template <class... N>
    static Two w(const W* p, N... n) {
        Two two;
        two.even = Vec::load_pairs(p, n..., two.odd);
        return two;
    }
    static Vec add(Vec sum, const Two& x, const Two& w) {
        return fma(x.odd, w.odd, fma(x.even, w.even, sum));
    }
};

// out[r * os + c] = x row r . w row c, for R rows and C columns; sums are kept in registers.
template <class P, int R, int C>
inline void dots_block(const typename P::X* x, int64_t xs, const typename P::W* w, int64_t ws, int64_t n,
                       float* out, int64_t os) {
    Vec sums[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[r][c] = Vec::set(0);
    // Prefetches the block after the next, line by line in memory order: prefetching at C places at once
    // reads at four fifths of the rate.
    constexpr int64_t kAsked = C * P::kStep * static_cast<int64_t>(sizeof(*w));
    const char* next = reinterpret_cast<const char*>(w + 2 * C * ws);
    int64_t k = 0;
    for (; k + P::kStep <= n; k += P::kStep) {
        decltype(P::w(w)) columns[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            columns[c] = P::w(w + c * ws + k);
        for (int64_t line = 0; line < kAsked; line += 64)
            prefetch(next + line);
        next += kAsked;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto row = P::x(x + r * xs + k);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                sums[r][c] = P::add(sums[r][c], row, columns[c]);
        }
    }
    if (k < n) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto row = P::x(x + r * xs + k, n - k);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                sums[r][c] = P::add(sums[r][c], row, P::w(w + c * ws + k, n - k));
        }
    }
    store_sums(sums, out, os);
}

template <class P, int C>
inline void dots_rows(const typename P::X* x, int64_t xs, int64_t rows, const typename P::W* w, int64_t ws,
                      int64_t n, float* out, int64_t os) {
    int64_t r = 0;
    for (; r + Vec::kRows <= rows; r += Vec::kRows)
        dots_block<P, Vec::kRows, C>(x + r * xs, xs, w, ws, n, out + r * os, os);
    if (Vec::kRows > 3 && rows - r == 3)
        dots_block<P, 3, C>(x + r * xs, xs, w, ws, n, out + r * os, os);
    else if (Vec::kRows > 2 && rows - r == 2)
        dots_block<P, 2, C>(x + r * xs, xs, w, ws, n, out + r * os, os);
    else if (rows - r == 1)
        dots_block<P, 1, C>(x + r * xs, xs, w, ws, n, out + r * os, os);
}

// out[r * os + c] = x row r . w row c; a few rows of w at a time are read once and stay in L1 for all rows of
// x.
template <class P>
inline void dots(const typename P::X* x, int64_t xs, int64_t rows, const typename P::W* w, int64_t ws,
                 int64_t columns, int64_t n, float* out, int64_t os) {
    int64_t c = 0;
    for (; c + Vec::kCols <= columns; c += Vec::kCols)
        dots_rows<P, Vec::kCols>(x, xs, rows, w + c * ws, ws, n, out + c, os);
    for (; c < columns; ++c)
        dots_rows<P, 1>(x, xs, rows, w + c * ws, ws, n, out + c, os);
}

// x . one row of w, in four partial sums.
template <class P, int64_t kDistance>
inline Vec dot_in_order(const typename P::X* x, const typename P::W* w, int64_t n) {
    constexpr int kSums = 4;
    constexpr int64_t kBytes = P::kStep * static_cast<int64_t>(sizeof(*w));
    Vec sums[kSums];
    for (auto& sum : sums)
        sum = Vec::set(0);
    int64_t k = 0;
    for (; k + kSums * P::kStep <= n; k += kSums * P::kStep) {
        const char* next = reinterpret_cast<const char*>(w + k) + kDistance;
        for (int64_t line = 0; line < kSums * kBytes; line += 64)
            prefetch(next + line);
        for (int i = 0; i < kSums; ++i)
            sums[i] = P::add(sums[i], P::x(x + k + i * P::kStep), P::w(w + k + i * P::kStep));
    }
    for (; k + P::kStep <= n; k += P::kStep)
        sums[0] = P::add(sums[0], P::x(x + k), P::w(w + k));
    if (k < n)
        sums[1] = P::add(sums[1], P::x(x + k, n - k), P::w(w + k, n - k));
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Up to this many inputs, the rows of w are read in memory order, one after another. A longer row of x
// competes for L1 with the weights; reading a few rows of w at a time then reuses each part of x while it is
// there. Measured on a Zen 4, GB/s of one thread from memory, in order and four at a time: 4096 inputs of
// bfloat16 22.6 and 19.9, 5632 16.7 and 19.5, 8192 13.8 and 21.4; 576 of float32 20.8 and 18.9, 2048 23.3 and
// 25.8, 8192 20.1 and 28.6.
template <class T>
constexpr int64_t kInOrder = sizeof(T) == sizeof(float) ? 1024 : 4608;

// The same for a parted row; how many rows of w are read at a time beyond it, and how many bytes ahead
// weights are prefetched up to it: distant prefetches slow a processor down that reads memory fast. Measured
// on a Zen 4, GB/s of two threads from memory of 60 GB/s (where memory had 34 GB/s, all of them reached it):
//
// inputs                                  1536  2048  4096  5632
// in order, 6144 bytes ahead                46    48    47    36
// in order, 512 bytes ahead                 52    54    50    33
// in order, not prefetched                  59    57    54    35
// eight rows at a time                      48    54    55    50
// a row in order that is not parted         47    44    47    34
//
// The processors with AMX were not measured so; theirs are the distances of the other formats.
#ifdef SLIPSTREAM_AMX
constexpr int64_t kPartedInOrder = kInOrder<Bf16>, kPartedAhead = kAhead;
constexpr int kPartedRows = Vec::kCols;
#else
constexpr int64_t kPartedInOrder = 2048, kPartedAhead = 512;
constexpr int kPartedRows = 8;
#endif

// out[c] = x . w row c: memory is read sequentially, the fastest order for any processor.
template <class P, int64_t kDistance = kAhead>
inline void dots_in_order(const typename P::X* x, const typename P::W* w, int64_t ws, int64_t columns,
                          int64_t n, float* out) {
    int64_t c = 0;
    for (; c + Vec::kCols <= columns; c += Vec::kCols) {
        Vec sums[1][Vec::kCols];
        for (int i = 0; i < Vec::kCols; ++i)
            sums[0][i] = dot_in_order<P, kDistance>(x, w + (c + i) * ws, n);
        store_sums(sums, out + c, 0);
    }
    for (; c < columns; ++c)
        out[c] = dot_in_order<P, kDistance>(x, w + c * ws, n).sum();
}

// out[c] = the parted row x . w row c.
inline void dots_parted(const float* x, const Bf16* w, int64_t ws, int64_t columns, int64_t n, float* out) {
    if (n <= kPartedInOrder)
        return dots_in_order<Parted, kPartedAhead>(x, w, ws, columns, n, out);
    int64_t c = 0;
    for (; c + kPartedRows <= columns; c += kPartedRows)
        dots_block<Parted, 1, kPartedRows>(x, n, w + c * ws, ws, n, out + c, columns);
    for (; c < columns; ++c)
        dots_block<Parted, 1, 1>(x, n, w + c * ws, ws, n, out + c, columns);
}

} // namespace
} // namespace slipstream
