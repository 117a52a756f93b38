// A few rows times a packed matrix that is read once: its codes are converted to lanes of bfloat16 in
// registers, and multiplied with all rows there.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// out[i * os + c] = sum of the lanes of v[c][i].
template <int R, int C>
inline void store_columns(const Vec (&v)[C][R], float* out, int64_t os) {
    Vec rows[R][C];
    for (int i = 0; i < R; ++i)
        for (int c = 0; c < C; ++c)
            rows[i][c] = v[c][i];
    store_sums(rows, out, os);
}

// sums[i] += x row i . the inputs in `w`, for R rows of x in N terms. The lanes of `w` cover consecutive
// inputs of one matrix row.
template <int R, int L, int N>
inline void few_dots(const Bf16* x, int64_t apart, const Bf16Lanes (&w)[L], Vec (&sums)[R]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int l = 0; l < L; ++l)
                sums[i] = dot(sums[i], Bf16Lanes::load(x + n * apart + i * kOperandStep + 32 * l), w[l]);
}

// The same for C rows of the matrix at once, which share the loads of x.
template <int R, int C, int L, int N>
inline void few_tile(const Bf16* x, int64_t apart, const Bf16Lanes (&w)[C][L], Vec (&sums)[R][C]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l)
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) {
                const Bf16Lanes lanes = Bf16Lanes::load(x + n * apart + i * kOperandStep + 32 * l);
                for (int c = 0; c < C; ++c)
                    sums[i][c] = dot(sums[i][c], lanes, w[c][l]);
            }
}

// sums[i][c] += inputs [from, to) of x row r + i . matrix row c, for a format with one factor per row; `from`
// is a multiple of kOperandStep.
template <class F, int R, int C, int N>
[[gnu::always_inline]] inline void few_inputs(const Operand& x, int64_t r, const F& codes,
                                              const PackedRow (&rows)[C], int64_t from, int64_t to,
                                              Vec (&sums)[R][C]) {
    const Bf16* terms = x.terms + r * x.stride;
    Bf16Lanes w[C][F::kLanes];
    int64_t k = from;
    for (; k + F::kStep <= to; k += F::kStep) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            codes.load(rows[c], k, w[c]);
            F::template ask<kPackedAhead>(rows[c], k);
        }
        few_tile<R, C, F::kLanes, N>(terms + operand_at<R>(k), x.apart, w, sums);
    }
    if (k < to) {
        for (int c = 0; c < C; ++c)
            codes.load(rows[c], k, to - k, w[c]);
        few_tile<R, C, F::kLanes, N>(terms + operand_at<R>(k), x.apart, w, sums);
    }
}

template <class F, int R, int C, int N>
[[gnu::always_inline]] inline void few_block(const Operand& x, int64_t r, const F& codes,
                                             const PackedRow (&rows)[C], const Matrix& m, float* out,
                                             int64_t os) {
    Vec sums[R][C];
    for (int i = 0; i < R; ++i)
        for (int c = 0; c < C; ++c)
            sums[i][c] = Vec::set(0);
    few_inputs<F, R, C, N>(x, r, codes, rows, 0, m.inputs, sums);
    store_sums(sums, out, os);
}

// If the rows of x have kFewestPassed numbers or more, the matrix is multiplied in blocks of kPassColumns of
// its rows by kPassInputs inputs, because the rows of x would not all stay in a first-level cache of 32 KB.
// Measured on a Zen 5: int8 with 5632 inputs takes 0.70 of the time of all inputs at once, fp6 0.69. On a Zen
// 4, eight rows of 2048 take 0.8 of the time with fp8, 0.95 with bf13; fewer inputs, or four rows, become
// slower.
constexpr int64_t kPassColumns = 8, kPassInputs = 1024, kFewestPassed = 8 * 2048;

// `few_block` in passes, for more than four rows of x and `columns` <= kPassColumns.
template <class F, int R, int N>
[[gnu::noinline]] void few_passes(const Operand& x, int64_t r, const F& codes, const Matrix& m,
                                  const PackedRows& all, int64_t o, int64_t columns, float* out, int64_t os) {
    alignas(64) float kept[kPassColumns / 2][R][2][Vec::kWidth];
    for (int64_t from = 0; from < m.inputs; from += kPassInputs) {
        const int64_t to = least(from + kPassInputs, m.inputs);
        for (int64_t c = 0; c < columns; c += 2) {
            const PackedRow rows[2] = {all.row(o + c), all.row(o + least(c + 1, columns - 1))};
            Vec sums[R][2];
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < 2; ++j)
                    sums[i][j] = from ? Vec::load(kept[c / 2][i][j]) : Vec::set(0);
            few_inputs<F, R, 2, N>(x, r, codes, rows, from, to, sums);
            if (to < m.inputs) {
                for (int i = 0; i < R; ++i)
                    for (int j = 0; j < 2; ++j)
                        sums[i][j].store(kept[c / 2][i][j]);
                continue;
            }
            float two[R * 2];
            const bool both = c + 1 < columns;
            store_sums(sums, both ? out + c : two, both ? os : 2);
            for (int i = 0; !both && i < R; ++i)
                out[c + i * os] = two[2 * i];
        }
    }
}

// A single row of x: the rows of the matrix are read one after another, in memory order.
template <class F, int C, int N>
inline void few_in_order(const Operand& x, int64_t r, const F& codes, const PackedRow (&rows)[C],
                         const Matrix& m, float* out) {
    const Bf16* terms = x.terms + r * x.stride;
    Vec sums[1][C];
    for (int c = 0; c < C; ++c) {
        Vec parts[N][F::kLanes]; // several accumulators keep the dependency chains short
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int l = 0; l < F::kLanes; ++l)
                parts[n][l] = Vec::set(0);
        const auto add = [&](int64_t k, const Bf16Lanes(&w)[F::kLanes]) {
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
                for (int l = 0; l < F::kLanes; ++l)
                    parts[n][l] = dot(parts[n][l], Bf16Lanes::load(terms + n * x.apart + k + 32 * l), w[l]);
        };
        Bf16Lanes w[F::kLanes];
        int64_t k = 0;
        for (; k + F::kStep <= m.inputs; k += F::kStep) {
            F::template ask<kAhead>(rows[c], k);
            codes.load(rows[c], k, w);
            add(k, w);
        }
        if (k < m.inputs) {
            F::template ask<kAhead>(rows[c], k);
            codes.load(rows[c], k, m.inputs - k, w);
            add(k, w);
        }
        sums[0][c] = Vec::set(0);
#pragma GCC unroll 3
        for (int n = N - 1; n >= 0; --n) // the smallest term first
#pragma GCC unroll 4
            for (int l = 0; l < F::kLanes; ++l)
                sums[0][c] = sums[0][c] + parts[n][l];
    }
    store_sums(sums, out, 0);
}

// One or two rows times int4: the scales and minima of sixteen groups are converted to float32 at a time.
template <class F, int R, int C, int N>
inline void few_grouped(const Operand& x, int64_t r, const F& codes, const PackedRow (&rows)[C],
                        const Matrix& m, float* out, int64_t os) {
    const GroupSpread spread(m.group);
    const int64_t groups = ceil_div(m.inputs, m.group), bytes = groups * m.group / 2;
    const Bf16* terms = x.terms + r * x.stride;
    Vec sums[C][R];
    for (int c = 0; c < C; ++c)
        for (int i = 0; i < R; ++i)
            sums[c][i] = Vec::set(0);
    for (int64_t g = 0; g < groups; g += 16) {
        const int64_t here = least(16, groups - g);
        Vec scales[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            scales[c] = Vec::load(rows[c].scales + g, here);
            prefetch(reinterpret_cast<const char*>(rows[c].scales + g) + kPackedAhead / 8);
            if (m.format != kInt4)
                continue;
            const Vec middle = fma(scales[c], Vec::set(8), Vec::load(rows[c].minima + g, here)); // of code 8
            prefetch(reinterpret_cast<const char*>(rows[c].minima + g) + kPackedAhead / 8);
            for (int i = 0; i < R; ++i)
                sums[c][i] = fma(middle, Vec::load(x.sums + (r + i) * x.sums_stride + g), sums[c][i]);
        }
        const int64_t begin = g * m.group / 2, end = least(bytes, begin + 8 * m.group);
        const auto step = [&](int64_t b, auto load) {
            const Lanes16 lanes = spread.lanes((b - begin) / 64);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                Bf16Lanes w[F::kLanes];
                load(rows[c].codes + b, w);
                prefetch(rows[c].codes + b + kPackedAhead);
                const Vec scale = lanes.of(scales[c]);
                Vec parts[R];
                for (int i = 0; i < R; ++i)
                    parts[i] = Vec::set(0);
                few_dots<R, F::kLanes, N>(terms + 2 * R * b, x.apart, w, parts);
                for (int i = 0; i < R; ++i)
                    sums[c][i] = fma(parts[i], scale, sums[c][i]);
            }
        };
        int64_t b = begin;
        for (; b + 64 <= end; b += 64)
            step(b, [&](const uint8_t* p, Bf16Lanes* w) { codes.load(p, w); });
        if (b < end)
            step(b, [&](const uint8_t* p, Bf16Lanes* w) { codes.load(p, end - b, w); });
    }
    store_columns(sums, out, os);
}

// out[i * os + c] = x row r + i . matrix row o + c, for R rows and `columns` <= C rows of the matrix.
template <class F, int R, int C, int N>
[[gnu::always_inline]] inline void few_columns(const Operand& x, int64_t r, const F& codes, const Matrix& m,
                                               const PackedRows& all, int64_t o, int64_t columns, float* out,
                                               int64_t os) {
    const auto at = [&](int64_t c) { return all.row(o + least(c, columns - 1)); };
    float part[R * C];
    float* to = columns == C ? out : part;
    const int64_t stride = columns == C ? os : C;
    const auto run = [&](const PackedRow(&w)[C]) {
        if constexpr (std::is_same<F, Grouped>::value)
            few_grouped<F, R, C, N>(x, r, codes, w, m, to, stride);
        else if constexpr (R == 1)
            few_in_order<F, C, N>(x, r, codes, w, m, to);
        else
            few_block<F, R, C, N>(x, r, codes, w, m, to, stride);
    };
    if constexpr (C == 4)
        run({at(0), at(1), at(2), at(3)});
    else
        run({at(0), at(1)});
    if (columns < C)
        for (int64_t i = 0; i < R; ++i)
            std::memcpy(out + i * os, part + i * C, static_cast<size_t>(columns) * sizeof(float));
}

// out[i * os + c] = x row r + i . matrix row o + c, for R rows and `columns` <= kPassColumns.
template <class F, int R, int N>
inline void few_group(const Operand& x, int64_t r, const F& codes, const Matrix& m, const PackedRows& all,
                      int64_t o, int64_t columns, float* out, int64_t os) {
    constexpr bool kSixes = std::is_same<F, GroupedSixes>::value, kFours = std::is_same<F, Grouped>::value;
    if constexpr (kSixes || (kFours && R >= kFewestTurned)) {
        turned_columns<R, N>(x, r, codes, all, o, columns, out, os);
    } else {
        if constexpr (R > 4)
            if (R * m.inputs >= kFewestPassed)
                return few_passes<F, R, N>(x, r, codes, m, all, o, columns, out, os);
        constexpr int C = R > 4 ? 2 : 4; // as many as fit into registers
        for (int64_t c = 0; c < columns; c += C)
            few_columns<F, R, C, N>(x, r, codes, m, all, o + c, least(C, columns - c), out + c, os);
    }
}

// Maximum number of rows that are multiplied with codes at once, without those that are processed in lanes of
// bytes.
template <class F>
constexpr int kFewTogether =
    std::is_same<F, Int8Codes>::value || std::is_same<F, Grouped>::value ? kFewestNarrow - 1 : 8;

template <class F, int N>
inline void few_rows(const Operand& x, const F& codes, const Matrix& m, int64_t begin, int64_t end,
                     float* out, int64_t os) {
    const int64_t rows = x.rows.count - x.in_lanes;
    const PackedRows all(m);
    static_assert(kTurnedColumns == kPassColumns, "both are taken at a time");
    for (int64_t o = begin; o < end; o += kPassColumns, out += kPassColumns) {
        const int64_t columns = least(kPassColumns, end - o);
        for (RowBlock b = RowBlock::at(0, rows); b.first < rows; b = RowBlock::at(b.first + b.rows, rows)) {
            const int64_t r = b.first;
            float* to = out + r * os;
            const auto run = [&](auto count) {
                few_group<F, decltype(count)::value, N>(x, r, codes, m, all, o, columns, to, os);
            };
            with_rows<kFewTogether<F>>(b.rows, run);
        }
    }
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's factor is applied.
inline void multiply_few(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                         int64_t os) {
    const auto run = [&](const auto& codes) {
        using F = typename std::decay<decltype(codes)>::type;
        switch (operand_terms(m)) {
        case 1:
            return few_rows<F, 1>(x, codes, m, begin, end, out, os);
        case 2:
            return few_rows<F, 2>(x, codes, m, begin, end, out, os);
        default:
            return few_rows<F, kMostTerms>(x, codes, m, begin, end, out, os);
        }
    };
    switch (m.format) {
    case kInt8:
        return run(Int8Codes(m));
    case kFp8:
        return run(Fp8Codes(m));
    case kBf13:
        return run(Bf13Codes(m));
    case kInt4:
    case kInt4Symmetric:
        return run(Grouped(m));
    default:
        return run(GroupedSixes(m));
    }
}

#endif

} // namespace
} // namespace slipstream
