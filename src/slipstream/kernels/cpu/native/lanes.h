// A few rows times a dense bfloat16 matrix that is read in place. A vector holds the same two inputs of
// sixteen rows, and each pair of weights is multiplied with all of them at once, so that nothing is summed
// across a vector.
//
// lanes    [group of rows][pair of inputs][row in group][input]
// halves   [half of the rows][four inputs][row in half][input], for at most sixteen rows
//          zeros beyond the rows and the inputs
//
// Measured with 16 tokens in six layers of 384 channels, one thread of a Zen 5: 1.08 ms where `dots` takes
// 1.30, a fifth of which goes into sums across vectors. With a single group, each product needs its own load
// of a pair of weights, and the processor does only two loads per cycle; two halves share one such load. With
// 384 inputs in L2: 460 GFLOP/s by a group, 537 by halves.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kLaneGroup = 16, kLaneLine = 2 * kLaneGroup;

#ifdef SLIPSTREAM_BF16_DOT

#ifdef SLIPSTREAM_AMX
constexpr int64_t kFewestInLanes = 4, kMostInLanes = 2 * kLaneGroup; // see lanes_tiles.h
#else
// With fewer rows many lanes are empty: eight rows of 1536 x 384 in the cache take 32 us, `dots` 25; from
// memory, with two threads, both are memory-bound.
constexpr int64_t kFewestInLanes = 12;
constexpr int64_t kMostInLanes = 3 * kLaneGroup;
#endif
// rows of the matrix per block; more rows at a power-of-two stride would conflict in the cache
constexpr int kLaneRows = 8;

// How many of the rows go in lanes: whole groups first, and the rest too if it has at least `fewest` rows.
inline int64_t rows_in_lanes(int64_t rows, int64_t fewest) {
    const int64_t rest = rows % kLaneGroup;
    return rest >= fewest ? rows : rows - rest;
}

// How many rows go in lanes for a dense matrix.
inline int64_t dense_in_lanes(int64_t rows) {
#ifdef SLIPSTREAM_AMX
    return rows >= kFewestInLanes ? rows : 0;
#else
    return rows_in_lanes(rows, kFewestInLanes);
#endif
}

// Whether a dense matrix can be read in place for rows in lanes; with tiles also a matrix that is decoded to
// bfloat16.
inline bool fits_lanes(const Matrix& m, int64_t rows) {
#ifdef SLIPSTREAM_AMX
    if (m.format == kFp8 || m.format == kBf13)
        return rows <= kMostInLanes;
#endif
    return m.format == kPlain && m.inputs % 2 == 0 && !m.runs[0].transposed && rows <= kMostInLanes;
}

// bfloat16 rows in lanes, and the sums of their products.
struct Bf16InLanes {
    using Item = Bf16;
    using Sum = Vec;
    static constexpr int64_t kInputs = 2; // per lane
    template <int S, int W>
    static constexpr int kVectors = S == 1 ? 1 : S / W; // result vectors per row of the matrix
    static Sum start(const int32_t*, int) { return Vec::set(0); }
    static Bf16Lanes row(const Bf16* p) { return Bf16Lanes::load(p); }
    static Bf16Lanes row(const Bf16* p, int64_t n) { return Bf16Lanes::load(p, n); }
    static Bf16Lanes lanes(const Bf16* p) { return Bf16Lanes::load(p); }
    template <int W, class... N>
    static Bf16Lanes weights(const Bf16* p, N... n) {
        return Bf16Lanes::spread<W>(p, n...);
    }
    static Sum add(Sum sum, Bf16Lanes lanes, Bf16Lanes weights) { return dot(sum, lanes, weights); }
    template <int S, int W>
    static void store(const Sum (&sums)[S], float* out) {
        for (int s = 0; s < kVectors<S, W>; ++s)
            (S == 2 && W == 2 ? fold(sums[s], sums[S - 1]) : sums[s]).store(out + s * kLaneGroup);
    }
};

// The number of items of one group of rows.
template <class P = Bf16InLanes>
inline int64_t lane_items(int64_t inputs) {
    constexpr int64_t kLine = kLaneGroup * P::kInputs;
    return ceil_div(inputs, kLine) * kLine * kLaneGroup;
}

template <class P>
inline void fill_lanes(const typename P::Item* x, int64_t stride, int64_t rows, int64_t inputs,
                       typename P::Item* lanes) {
    constexpr int64_t kLine = kLaneGroup * P::kInputs;
    alignas(64) typename P::Item square[kLaneGroup * kLine];
    for (int64_t first = 0; first < rows; first += kLaneGroup) {
        const int64_t count = least(kLaneGroup, rows - first);
        std::memset(static_cast<void*>(square), 0, sizeof(square));
        for (int64_t i = 0; i < inputs; i += kLine, lanes += kLaneGroup * kLine) {
            const int64_t n = least(kLine, inputs - i);
            for (int64_t r = 0; r < count; ++r) {
                const auto* from = x + (first + r) * stride + i;
                (n == kLine ? P::row(from) : P::row(from, n)).store(square + r * kLine);
            }
            transpose(reinterpret_cast<const float*>(square), kLaneGroup, reinterpret_cast<float*>(lanes),
                      kLaneGroup);
        }
    }
}

// out[r * os + j] = row r of `columns` <= 16 columns of results, where block[j][s] holds those of row group
// s; each row is the sum of W lanes.
template <int S, int W = 1>
inline void turn_lanes(const float* block, int64_t rows, int64_t columns, float* out, int64_t os) {
    constexpr int64_t kRows = kLaneGroup / W;
    for (int s = 0; s < S; ++s) {
        Vec v[kLaneGroup];
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLaneGroup; ++j)
            v[j] = Vec::load(block + (j * S + s) * kLaneGroup);
        transpose(v);
        float* to = out + s * kRows * os;
        for (int64_t r = 0; r < least(kRows, rows - s * kRows); ++r) {
            const Vec row = W == 1 ? v[r] : v[W * r] + v[W * r + W - 1];
            columns == kLaneGroup ? row.store(to + r * os) : row.store(to + r * os, columns);
        }
    }
}

#ifndef SLIPSTREAM_AMX // with AMX, tiles are used instead
// Calls `f` with the layout of `rows` rows in lanes: S groups, in which a row has W lanes that take inputs
// alternately. S = W = 2 is the layout `halves` for at most sixteen rows, see the top of this file.
template <class F>
inline void with_lanes_of(int64_t rows, F f) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (rows <= kLaneGroup / 2)
        f(One(), Two());
    else if (rows <= kLaneGroup)
        f(Two(), Two());
    else if (rows <= 2 * kLaneGroup)
        f(Two(), One());
    else
        f(std::integral_constant<int, 3>(), One());
}

// Lays out up to eight rows with two lanes each; for halves it takes every other pair of rows, so that `fold`
// puts all of them in order.
template <class P, bool kHalf>
inline void fill_eight(const typename P::Item* x, int64_t stride, int64_t rows, int64_t inputs,
                       typename P::Item* lanes) {
    constexpr int64_t kRows = kLaneGroup / 2, kLine = kLaneGroup * P::kInputs;
    alignas(64) typename P::Item square[kRows * kLine];
    std::memset(static_cast<void*>(square), 0, sizeof(square));
    for (int64_t i = 0; i < inputs; i += kLine, lanes += kRows * kLine) {
        const int64_t n = least(kLine, inputs - i);
        for (int64_t j = 0; j < kRows; ++j) {
            const int64_t r = kHalf ? j / 2 * 4 + j % 2 : j;
            const auto* from = x + r * stride + i;
            if (r < rows)
                (n == kLine ? P::row(from) : P::row(from, n)).store(square + j * kLine);
        }
        transpose_eight(square, 64, lanes);
    }
}

template <class P = Bf16InLanes>
inline void lay_in_lanes(const typename P::Item* x, int64_t stride, int64_t rows, int64_t inputs,
                         typename P::Item* lanes) {
    with_lanes_of(rows, [&](auto groups, auto shared) {
        constexpr int S = decltype(groups)::value, W = decltype(shared)::value;
        if constexpr (W == 1) {
            fill_lanes<P>(x, stride, rows, inputs, lanes);
        } else {
            fill_eight<P, S == 2>(x, stride, rows, inputs, lanes);
            if constexpr (S == 2)
                fill_eight<P, true>(x + 2 * stride, stride, rows - 2, inputs,
                                    lanes + lane_items<P>(inputs) / W);
        }
    });
}

// out[r][s] = the products of kLaneRows rows of w with S groups of rows of x, which are `group` items apart;
// for two halves (S = W = 2) the folded result. `starts`: initial values of the sums of each lane, for
// integer sums. Prefetches from `next` on, one line per iteration.
template <class P, int S, int W>
[[gnu::noinline]] void lanes_block(const typename P::Item* x, int64_t group, const typename P::Item* w,
                                   int64_t ws, int64_t inputs, float* out, const int32_t* starts,
                                   const void* next) {
    // inputs of one product, and of one iteration
    constexpr int64_t kStep = W * P::kInputs, kTurn = 2 * P::kInputs;
    typename P::Sum sums[kLaneRows][S];
#pragma GCC unroll 16
    for (auto& row : sums)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            row[s] = P::start(starts, s);
    const char* line = static_cast<const char*>(next);
    const auto add = [&](int64_t i, auto... left) {
        decltype(P::lanes(x)) lanes[S];
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            lanes[s] = P::lanes(x + s * group + i * (kLaneGroup / W));
#pragma GCC unroll 8
        for (int r = 0; r < kLaneRows; ++r) {
            const auto some = P::template weights<W>(w + r * ws + i, left...);
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s] = P::add(sums[r][s], lanes[s], some);
        }
    };
    int64_t i = 0;
    for (; i + kTurn <= inputs; i += kTurn, line += 64) {
        prefetch(line);
#pragma GCC unroll 2
        for (int64_t j = 0; j < kTurn; j += kStep)
            add(i + j);
    }
    for (; i + kStep < inputs; i += kStep)
        add(i);
    if (i < inputs)
        add(i, inputs - i);
#pragma GCC unroll 16
    for (int r = 0; r < kLaneRows; ++r)
        P::template store<S, W>(sums[r], out + r * P::template kVectors<S, W> * kLaneGroup);
}

// out[r * os + j] = x row r . w row j. Returns how many of the `columns` rows of w were done: whole blocks;
// those that do not fill a block are left out.
template <class P, int S, int W>
inline int64_t multiply_lanes(const typename P::Item* x, int64_t rows, const typename P::Item* w, int64_t ws,
                              int64_t inputs, int64_t columns, float* out, int64_t os,
                              const int32_t* starts = nullptr) {
    constexpr int kOut = P::template kVectors<S, W>;
    alignas(64) float block[2 * kLaneRows * kOut * kLaneGroup] = {};
    const int64_t whole = columns / kLaneRows * kLaneRows, group = lane_items<P>(inputs) / W;
    for (int64_t c = 0; c < whole; c += 2 * kLaneRows) {
        const int64_t n = least(2 * kLaneRows, whole - c);
        for (int64_t half = 0; half < n; half += kLaneRows) {
            const typename P::Item *at = w + (c + half) * ws, *after_the_next = at + 2 * kLaneRows * ws;
            lanes_block<P, S, W>(x, group, at, ws, inputs, block + half * kOut * kLaneGroup, starts,
                                 after_the_next);
        }
        turn_lanes<kOut, S == 1 ? W : 1>(block, rows, n, out + c, os);
    }
    return whole;
}

template <class P = Bf16InLanes>
inline int64_t multiply_lanes(const typename P::Item* x, int64_t rows, const typename P::Item* w, int64_t ws,
                              int64_t inputs, int64_t columns, float* out, int64_t os,
                              const int32_t* starts = nullptr) {
    int64_t done = 0;
    with_lanes_of(rows, [&](auto groups, auto shared) {
        constexpr int S = decltype(groups)::value, W = decltype(shared)::value;
        done = multiply_lanes<P, S, W>(x, rows, w, ws, inputs, columns, out, os, starts);
    });
    return done;
}
#else
inline void lay_in_lanes(const Bf16* x, int64_t stride, int64_t rows, int64_t inputs, Bf16* lanes) {
    fill_lanes<Bf16InLanes>(x, stride, rows, inputs, lanes);
}
#endif

#endif

} // namespace
} // namespace slipstream
