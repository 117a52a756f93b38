// Four or eight rows times int4, in an order in which each lane has inputs of one group alone: sums are
// multiplied by scales once for 512 inputs, where `few_grouped` does so for 128.
//
// Measured against the latter in L2, one thread of a Zen 5: 4 rows of 576, 1536 and 2048 inputs take 0.91,
// 0.92 and 0.88 of its time, 8 rows 0.92, 0.98 and 0.98; products alone would take half of that.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// What all rows of a matrix of int4 have in common: divisions take longer than a short row.
struct Grouped : Int4Codes {
    explicit Grouped(const Matrix& m)
        : order(m.inputs, m.group, kFewestTurned), spread(m.group), groups(order.inputs / m.group),
          in_turned(Nibbled::kTurned / m.group), in_step(kOperandStep / m.group), minima(m.format == kInt4) {}
    Nibbled order;
    TurnedSpread spread;
    int64_t groups, in_turned, in_step;
    bool minima;
};

// sums[i] += the sum of x row r + i times what code 8 stands for, which the tables leave out.
template <int R>
[[gnu::always_inline]] inline void add_middles(const Operand& x, int64_t r, const Grouped& g,
                                               const PackedRow& row, Vec (&sums)[R]) {
    const float* of_x = x.sums + r * x.sums_stride;
    for (int64_t k = 0; k < g.groups; k += Vec::kWidth) {
        const int64_t n = least(Vec::kWidth, g.groups - k);
        __builtin_prefetch(reinterpret_cast<const char*>(row.minima + k) + kPackedAhead / 8, 0, 2);
        const Vec middle = fma(Vec::load(row.scales + k, n), Vec::set(8), Vec::load(row.minima + k, n));
        for (int i = 0; i < R; ++i)
            sums[i] = fma(middle, Vec::load(of_x + i * x.sums_stride + k), sums[i]);
    }
}

// sums[i] += R rows of x, in N terms, times W registers of codes of which each word has J, and their scales.
template <int R, int N, int J, int W>
[[gnu::always_inline]] inline void turned_dots(const Int4Codes& codes, const Codes (&raw)[W], const Bf16* x,
                                               int64_t apart, Vec scales, Vec (&sums)[R]) {
    constexpr int kChains = static_cast<int>(least(W * J, 16 / R)); // none waits for the sum before it
    Vec parts[kChains][R];
    for (auto& chain : parts)
        for (auto& part : chain)
            part = Vec::set(0);
#pragma GCC unroll 16
    for (int j = 0; j < W * J; ++j) {
        const Bf16Lanes w[1][1] = {{codes.some(raw[j / J], j % J)}};
        const Bf16* from = x + j / J * (R * kOperandStep) + j % J * 32;
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n)
                parts[j % kChains][i] =
                    dot(parts[j % kChains][i], Bf16Lanes::load(from + n * apart + i * kOperandStep), w[0][0]);
    }
#pragma GCC unroll 16
    for (int half = kChains / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j)
            for (int i = 0; i < R; ++i)
                parts[j][i] = parts[j][i] + parts[j + half][i];
    for (int i = 0; i < R; ++i)
        sums[i] = fma(parts[0][i], scales, sums[i]);
}

// sums[i] = x row r + i . a row of the matrix.
template <int R, int N>
[[gnu::always_inline]] inline void turned_row(const Operand& x, int64_t r, const Grouped& g,
                                              const PackedRow& row, Vec (&sums)[R]) {
    for (auto& sum : sums)
        sum = Vec::set(0);
    if (g.minima)
        add_middles(x, r, g, row, sums);
    const Bf16* terms = x.terms + r * x.stride;
    const uint8_t* at = row.codes;
    int64_t left = g.order.inputs;
    const Half* scales = row.scales;
    for (; left >= Nibbled::kTurned; left -= Nibbled::kTurned, at += Nibbled::kTurned / 2) {
        Codes raw[4];
        Int4Codes::turned(at, raw);
        for (int64_t line = 0; line < Nibbled::kTurned / 2; line += 64)
            __builtin_prefetch(at + line + kPackedAhead, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(scales) + kPackedAhead / 8, 0, 2);
        turned_dots<R, N, 4>(g, raw, terms, x.apart, g.spread.turned.of(Vec::load(scales, g.in_turned)),
                             sums);
        terms += R * Nibbled::kTurned;
        scales += g.in_turned;
    }
    for (; left > Nibbled::kWide; left -= kOperandStep, at += kOperandStep / 2) {
        const Codes raw[1] = {Codes::load(at, left / 2)};
        __builtin_prefetch(at + kPackedAhead, 0, 2);
        turned_dots<R, N, 4>(
            g, raw, terms, x.apart,
            g.spread.quarters.of(Vec::load(scales, least(g.in_step, left * g.in_step / kOperandStep))), sums);
        terms += R * kOperandStep;
        scales += g.in_step;
    }
    if (left > 0) {
        const Codes raw[1] = {Int4Codes::wide(at, left / 2)};
        __builtin_prefetch(at + kPackedAhead, 0, 2);
        turned_dots<R, N, 2>(
            g, raw, terms, x.apart,
            g.spread.halves.of(Vec::load(scales, least(g.in_step, left * g.in_step / kOperandStep))), sums);
    }
}

// out[i * os + c] = x row r + i . row c of the matrix, for R rows and C.
template <int R, int C, int N>
[[gnu::noinline]] void turned_block(const Operand& x, int64_t r, const Grouped& g, const PackedRow (&rows)[C],
                                    float* out, int64_t os) {
    alignas(64) float all[C][R][Vec::kWidth];
    for (int c = 0; c < C; ++c) {
        Vec sums[R];
        turned_row<R, N>(x, r, g, rows[c], sums);
        for (int i = 0; i < R; ++i)
            sums[i].store(all[c][i]);
    }
    Vec sums[R][C];
    for (int c = 0; c < C; ++c)
        for (int i = 0; i < R; ++i)
            sums[i][c] = Vec::load(all[c][i]);
    store_sums(sums, out, os);
}

#endif

} // namespace
} // namespace slipstream
