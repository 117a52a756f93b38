// A few rows in words times a packed matrix with integer codes, both in memory order: some rows of the matrix
// are multiplied with some rows of x, sixteen inputs at a time, so that each load serves several products.
// Sums are exact in int32 until they are multiplied by a scale.
//
// Measured on a Zen 3 with AVX2, one thread, 1536 x 576 and 512 x 2048 not in the caches, relative to rows in
// lanes: two rows of int4 take 0.63 of the time, three 0.57, four 0.7, six 0.8 and eight 0.95; of fp6 two
// take 0.75, four 0.8 and six 1.1; of int8 three take 0.9, four 0.77, six 0.87, eight 1.0, and two 1.1 of the
// time of float32. Rows in float32, with two words per number, relative to products in float32: two rows of
// int4 take 0.4 of the time, four 0.65, six 0.6; of fp6 0.31, 0.6 and 0.87. The baseline multiplies two rows
// of int8 in 0.18 of that time, and two of int4 in 0.8 of the time of rows in lanes, four in 1.1.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// Rows of the matrix that are multiplied with T rows of x at once: as many as fit into registers with kWords
// registers of codes each.
template <int kWords, int T>
constexpr int kBesideWords = kWords > 2 ? 1 : (T <= 2 ? 4 : 2);

// out[t * os + r] = row t of x . row r, from the totals of T rows of words, N of which make up a row of x.
template <int N, int T, int R>
[[gnu::always_inline]] inline void store_totals(const WordTotals (&totals)[R][T], float* out, int64_t os) {
#pragma GCC unroll 4
    for (int t = 0; t < T; t += N, out += os)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            out[r] = (N == 1 ? totals[r][t] : fma(totals[r][t], kUpperWord, totals[r][t + N - 1])).sum();
}

// out[t * os + r] = row t of x, of T rows of words, . row r of R rows of codes in groups of B blocks, before
// the units are applied. `beyond`: at least a whole vector of scales may be read past the end.
template <class F, int B, int N, int T, int R>
[[gnu::always_inline]] inline void words_by_rows(const Operand& x, int64_t first, const PackedRow (&rows)[R],
                                                 int64_t groups, bool beyond, float* out, int64_t os) {
    constexpr int64_t kAtOnce = 32;
    WordTotals totals[R][T];
    const int64_t ahead = most(kAhead, R * groups * B * F::kBytes);
    const int16_t* words = x.words + first * x.stride;
    const float* x_sums = x.sums + first * x.sums_stride;
    for (int64_t g = 0; g < groups; g += kAtOnce) {
        const int64_t here = least(kAtOnce, groups - g);
        alignas(64) float scales[R][kAtOnce];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            for (int64_t j = 0; j < here; j += Vec::kWidth) {
                const auto numbers = [&](const Half* p) {
                    return some_numbers(p + g + j, here - j, beyond, ahead);
                };
                const Vec scale = numbers(rows[r].scales);
                scale.store(scales[r] + j);
                if constexpr (std::is_same<F, HalvesOfBytes>::value) {
                    const Vec least_code = rows[r].minima ? numbers(rows[r].minima) : scale * Vec::set(-8);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t)
                        totals[r][t] =
                            totals[r][t] +
                            WordTotals::folded(least_code * Vec::load(x_sums + t * x.sums_stride + g + j));
                }
            }
        for (int64_t i = 0; i < here; ++i)
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b, words += F::kInputs) {
                const int64_t block = (g + i) * B + b;
                Words codes[R][F::kWords];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    if (block % 4 == 0) {
                        prefetch(rows[r].codes + block * F::kBytes + ahead);
                        if (F::kBytes > 16)
                            prefetch(rows[r].codes + block * F::kBytes + ahead + 64);
                        if (rows[r].crumbs)
                            prefetch(rows[r].crumbs + block * 16 + ahead / 2);
                    }
                    F::load(rows[r], block, codes[r]);
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    WordSums sums[R];
#pragma GCC unroll 8
                    for (int w = 0; w < F::kWords; ++w) {
                        const Words inputs = Words::load(words + t * x.stride + w * Words::kWidth);
#pragma GCC unroll 4
                        for (int r = 0; r < R; ++r)
                            sums[r] = dot(sums[r], codes[r][w], inputs);
                    }
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r)
                        totals[r][t] = fma(WordTotals::of(sums[r]), scales[r][i], totals[r][t]);
                }
            }
    }
    store_totals<N>(totals, out, os);
}

// The same for int8, which has no groups, and rows of one word per number.
template <int T, int R>
[[gnu::always_inline]] inline void int8_by_rows(const Operand& x, int64_t first, const PackedRow (&rows)[R],
                                                int64_t inputs, float* out, int64_t os) {
    constexpr int64_t kSpan = 512; // this many products fit into int32
    const int16_t* words = x.words + first * x.stride;
    WordTotals totals[R][T];
    for (int64_t from = 0; from < inputs; from += kSpan) {
        const int64_t end = least(inputs, from + kSpan);
        WordSums sums[R][T];
        const auto step = [&](const int8_t* const(&codes)[R], int64_t k) {
            Words some[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                some[r] = Words::load(codes[r]);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const Words here = Words::load(words + t * x.stride + k);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    sums[r][t] = dot(sums[r][t], some[r], here);
            }
        };
        int64_t k = from;
        for (; k + Words::kWidth <= end; k += Words::kWidth) {
            const int8_t* codes[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                codes[r] = reinterpret_cast<const int8_t*>(rows[r].codes) + k;
                if (k % 64 == 0)
                    prefetch(codes[r] + most(kAhead, R * inputs));
            }
            step(codes, k);
        }
        if (k < end) {
            int8_t rest[R][Words::kWidth] = {};
            const int8_t* codes[R];
            for (int r = 0; r < R; ++r) {
                std::memcpy(rest[r], rows[r].codes + k, static_cast<size_t>(end - k));
                codes[r] = rest[r];
            }
            step(codes, k);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
                totals[r][t] = totals[r][t] + WordTotals::of(sums[r][t]);
    }
    store_totals<1>(totals, out, os);
}

// Call run(rows, index of the last, out) for R rows of a matrix at a time, and for the remaining ones one by
// one.
template <int R, class F>
inline void each_rows(const PackedRows& all, int64_t begin, int64_t end, float* out, F run) {
    int64_t o = begin;
    for (; o + R <= end; o += R) {
        PackedRow rows[R];
        for (int r = 0; r < R; ++r)
            rows[r] = all.row(o + r);
        run(rows, o + R - 1, out + o - begin);
    }
    for (; o < end; ++o) {
        const PackedRow rows[1] = {all.row(o)};
        run(rows, o, out + o - begin);
    }
}

// Multiply T rows of words, from `first` on; N of them make up a row of x.
template <int N, int T>
[[gnu::noinline]] void some_by_rows(const Operand& x, int64_t first, const Matrix& m, int64_t begin,
                                    int64_t end, float* out, int64_t os) {
    const PackedRows all(m);
    out += first / N * os;
    if (N == 1 && m.format == kInt8) {
        each_rows<kBesideWords<1, T>>(all, begin, end, out, [&](auto& rows, int64_t, float* to) {
            int8_by_rows<T>(x, first, rows, m.inputs, to, os);
        });
        return;
    }
    const int64_t groups = ceil_div(m.inputs, m.group);
    const int64_t whole = ceil_div(groups, Vec::kWidth) * Vec::kWidth;
    const auto grouped = [&](auto format, auto blocks) {
        using F = decltype(format);
        each_rows<kBesideWords<F::kWords, T>>(all, begin, end, out, [&](auto& rows, int64_t last, float* to) {
            const bool beyond = (m.outputs - last) * groups >= whole;
            words_by_rows<F, decltype(blocks)::value, N, T>(x, first, rows, groups, beyond, to, os);
        });
    };
    if (m.format == kFp6E2m3)
        grouped(SixesOfBytes(), std::integral_constant<int, 1>());
    else if (m.group == 32)
        grouped(HalvesOfBytes(), std::integral_constant<int, 1>());
    else if (m.group == 64)
        grouped(HalvesOfBytes(), std::integral_constant<int, 2>());
    else
        grouped(HalvesOfBytes(), std::integral_constant<int, 4>());
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's factor is applied.
inline void multiply_by_rows(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                             int64_t os) {
    const int64_t rows = x.rows.count;
    if (words_of(m) == 2) {
        int64_t r = 0;
        for (; r + 4 <= 2 * rows; r += 4)
            some_by_rows<2, 4>(x, r, m, begin, end, out, os);
        if (r < 2 * rows)
            some_by_rows<2, 2>(x, r, m, begin, end, out, os);
    }
    for (int64_t r = 0; words_of(m) == 1 && r < rows;) { // never a single row
        const int64_t left = rows - r, some = left == 5 ? 3 : least(left, 4);
        if (some == 4)
            some_by_rows<1, 4>(x, r, m, begin, end, out, os);
        else if (some == 3)
            some_by_rows<1, 3>(x, r, m, begin, end, out, os);
        else
            some_by_rows<1, 2>(x, r, m, begin, end, out, os);
        r += some;
    }
    const float unit = m.format == kFp6E2m3 ? SixesOfBytes::kUnit : 1;
    for (int64_t r = 0; r < rows; ++r) {
        const Vec factor = Vec::set(x.units[r] * unit);
        for (int64_t j = 0; j < end - begin; j += Vec::kWidth) {
            const int64_t n = least(end - begin - j, Vec::kWidth);
            (Vec::load(out + r * os + j, n) * factor).store(out + r * os + j, n);
        }
    }
}

#endif

} // namespace
} // namespace slipstream
