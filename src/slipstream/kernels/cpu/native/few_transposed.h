// Four or more rows times int4, and any few rows times fp6, in an order in which each lane only has inputs of
// one group: sums are multiplied by scales once per 512 inputs (256 of fp6), where `few_grouped` does so per
// 128.
//
// Measured relative to `few_grouped`, weights in L2, one thread of a Zen 5: 4 rows of 576, 1536 and 2048
// inputs take 0.91, 0.92 and 0.88 of its time, 8 rows 0.92, 0.98 and 0.98; the products alone would take half
// of that.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// Return the offset of input k of the first of R rows.
template <int R>
inline int64_t operand_at(int64_t k) {
    return k / kOperandStep * (R * kOperandStep) + k % kOperandStep;
}

// Quantities that all rows of an int4 matrix share; the divisions take longer than a short row.
struct Grouped : Int4Codes {
    explicit Grouped(const Matrix& m)
        : order(m.inputs, m.group, kFewestTurned), spread(m.group), groups(order.inputs / m.group),
          in_turned(Nibbled::kTurned / m.group), in_step(kOperandStep / m.group), minima(m.format == kInt4) {}
    static constexpr int64_t kFits = 12288; // inputs of all rows of x together, see turned_columns
    int64_t padded() const { return order.inputs; }
    Nibbled order;
    TurnedSpread spread;
    int64_t groups, in_turned, in_step;
    bool minima;
};

// Quantities that all rows of an fp6 matrix share.
struct GroupedSixes : Fp6Codes {
    explicit GroupedSixes(const Matrix& m)
        : Fp6Codes(m), numbers(32), inputs(ceil_div(m.inputs, m.group) * m.group) {}
    static constexpr int64_t kFits = 16384;
    int64_t padded() const { return inputs; }
    GroupNumbers numbers; // one number per quarter of the lanes
    int64_t inputs;
};

// sums[i] += the sum of x row r + i in each group, times the value of code 8, which the code table omits.
template <int R>
[[gnu::always_inline]] inline void add_middles(const Operand& x, int64_t r, const Grouped& g,
                                               const PackedRow& row, Vec (&sums)[R]) {
    if (!g.minima)
        return;
    const float* of_x = x.sums + r * x.sums_stride;
    for (int64_t k = 0; k < g.groups; k += Vec::kWidth) {
        const int64_t n = least(Vec::kWidth, g.groups - k);
        prefetch(reinterpret_cast<const char*>(row.minima + k) + kPackedAhead / 8);
        const Vec middle = fma(Vec::load(row.scales + k, n), Vec::set(8), Vec::load(row.minima + k, n));
        for (int i = 0; i < R; ++i)
            sums[i] = fma(middle, Vec::load(of_x + i * x.sums_stride + k), sums[i]);
    }
}

// sums[i] += R rows of x, in N terms, times W registers with J codes per word, times the scales of the lanes.
template <int R, int N, int J, class F, int W>
[[gnu::always_inline]] inline void turned_dots(const F& codes, const Codes (&raw)[W], const Bf16* x,
                                               int64_t apart, Vec scales, Vec (&sums)[R]) {
    constexpr int64_t kRegisters = kOperandStep / 32; // of one row, before those of the next row
    // Enough independent sums to hide the latency; a power of two.
    constexpr int kChains = static_cast<int>(least(W * J, R > 4 ? 2 : (R > 2 ? 4 : (R > 1 ? 8 : 16))));
    Vec parts[kChains][R];
    for (auto& chain : parts)
        for (auto& part : chain)
            part = Vec::set(0);
#pragma GCC unroll 16
    for (int j = 0; j < W * J; ++j) {
        const Bf16Lanes w[1][1] = {{codes.some(raw[j / J], j % J)}};
        const Bf16* from = x + j / kRegisters * (R * kOperandStep) + j % kRegisters * 32;
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

// sums[i] += what is the same for all inputs of a group: nothing for fp6.
template <int R>
[[gnu::always_inline]] inline void add_middles(const Operand&, int64_t, const GroupedSixes&, const PackedRow&,
                                               Vec (&)[R]) {}

// sums[i] += inputs [from, to) of x row r + i . one row of the matrix; `from` is a multiple of 512, and so is
// `to` unless it is the end.
template <int R, int N>
[[gnu::always_inline]] inline void turned_inputs(const Operand& x, int64_t r, const GroupedSixes& g,
                                                 const PackedRow& row, int64_t from, int64_t to,
                                                 Vec (&sums)[R]) {
    const Bf16* terms = x.terms + r * x.stride;
    const uint8_t *codes = row.codes + from / 2, *upper = row.crumbs + from / 4;
    const Half* scales = row.scales + from / 64;
    for (; to - from >= Sixes::kTurned; from += Sixes::kTurned, codes += 128, upper += 64, scales += 4) {
        Codes raw[4];
        Sixes::turned(codes, upper, raw);
        Sixes::ask<kPackedAhead>(codes, upper, scales);
        turned_dots<R, N, 2>(g, raw, terms + R * from, x.apart, g.numbers.of<4>(scales), sums);
    }
    for (; from < to; from += 64, codes += 32, upper += 16, ++scales) {
        const Codes raw[1] = {Sixes::plain(codes, upper)};
        turned_dots<R, N, 2>(g, raw, terms + operand_at<R>(from), x.apart, everywhere(scales), sums);
    }
}

template <int R, int N>
[[gnu::always_inline]] inline void turned_inputs(const Operand& x, int64_t r, const Grouped& g,
                                                 const PackedRow& row, int64_t from, int64_t to,
                                                 Vec (&sums)[R]) {
    const Bf16* terms = x.terms + r * x.stride + R * from;
    const uint8_t* at = row.codes + from / 2;
    const Half* scales = row.scales + from / Nibbled::kTurned * g.in_turned;
    int64_t left = to - from;
    for (; left >= Nibbled::kTurned; left -= Nibbled::kTurned, at += Nibbled::kTurned / 2) {
        Codes raw[4];
        Int4Codes::turned(at, raw);
        for (int64_t line = 0; line < Nibbled::kTurned / 2; line += 64)
            prefetch(at + line + kPackedAhead);
        prefetch(reinterpret_cast<const char*>(scales) + kPackedAhead / 8);
        turned_dots<R, N, 4>(g, raw, terms, x.apart, g.spread.turned.of(Vec::load(scales, g.in_turned)),
                             sums);
        terms += R * Nibbled::kTurned;
        scales += g.in_turned;
    }
    for (; left > Nibbled::kWide; left -= kOperandStep, at += kOperandStep / 2) {
        const Codes raw[1] = {Codes::load(at, left / 2)};
        prefetch(at + kPackedAhead);
        turned_dots<R, N, 4>(
            g, raw, terms, x.apart,
            g.spread.quarters.of(Vec::load(scales, least(g.in_step, left * g.in_step / kOperandStep))), sums);
        terms += R * kOperandStep;
        scales += g.in_step;
    }
    if (left > 0) {
        const Codes raw[1] = {Int4Codes::wide(at, left / 2)};
        prefetch(at + kPackedAhead);
        turned_dots<R, N, 2>(
            g, raw, terms, x.apart,
            g.spread.halves.of(Vec::load(scales, least(g.in_step, left * g.in_step / kOperandStep))), sums);
    }
}

// Rows of the matrix in one block, see turned_deep.
constexpr int64_t kTurnedColumns = 8;

// Return the inputs per block, such that rows of x stay in the first-level cache while they are multiplied
// with the rows of the matrix. Measured on a Zen 5 with int4: 8 rows of 5632 inputs take 0.41 of the time of
// all inputs at once, and 8 rows of 2048 take 0.78 if the matrix comes from memory; where all inputs fit,
// storing sums in between costs 5 %. With fp6, whose codes take more operations, 8 rows of 5632 take 0.8 and
// of 2048 1.05.
template <int R, class G>
inline int64_t turned_deep(const G& g) {
    constexpr int64_t kFits = G::kFits / R, kDeep = 8192 / R / Nibbled::kTurned * Nibbled::kTurned;
    return g.padded() <= kFits ? g.padded() : kDeep;
}

// out[i * os + c] = x row r + i . matrix row o + c, for R rows and `columns` <= kTurnedColumns.
template <int R, int N, class G>
[[gnu::noinline]] void turned_columns(const Operand& x, int64_t r, const G& g, const PackedRows& all,
                                      int64_t o, int64_t columns, float* out, int64_t os) {
    alignas(64) float kept[kTurnedColumns][R][Vec::kWidth];
    const int64_t deep = turned_deep<R>(g);
    for (int64_t from = 0; from < g.padded(); from += deep) {
        const int64_t to = least(from + deep, g.padded());
        for (int64_t c = 0; c < columns; ++c) {
            const PackedRow row = all.row(o + c);
            Vec sums[R];
            for (int i = 0; i < R; ++i)
                sums[i] = from ? Vec::load(kept[c][i]) : Vec::set(0);
            if (!from)
                add_middles(x, r, g, row, sums);
            turned_inputs<R, N>(x, r, g, row, from, to, sums);
            for (int i = 0; i < R; ++i)
                sums[i].store(kept[c][i]);
        }
    }
    constexpr int C = R > 4 ? 2 : 4;
    for (int64_t c = 0; c < columns; c += C) {
        Vec sums[R][C];
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < C; ++j)
                sums[i][j] = Vec::load(kept[least(c + j, columns - 1)][i]);
        float some[R * C];
        const bool whole = c + C <= columns;
        store_sums(sums, whole ? out + c : some, whole ? os : C);
        for (int i = 0; !whole && i < R; ++i)
            std::memcpy(out + c + i * os, some + C * i, static_cast<size_t>(columns - c) * sizeof(float));
    }
}

#endif

} // namespace
} // namespace slipstream
