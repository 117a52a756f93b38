// Many rows in words times a packed matrix whose codes are whole numbers, where there are no products of
// bytes: a panel has its codes in words, so that one instruction takes the place of two products in float32.
// Sums are exact in int32 over a span of inputs.
//
// packed   [group][span][pair of inputs][token in group][input]
//          of formats with groups then of each token the sum of the span, in float32
// panel    [row][input], and then what CodeWords brings of each span
//
// Measured on a Zen 3 with AVX2, one thread, 512 rows and 1536 x 576, beside products in float32: int8 takes
// 0.67 of the time, int4 and fp6 0.80.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// kNumbers: codes have groups, of which the smallest is a span.
template <bool kNumbers>
struct WholeWord : InRegisters {
    using Item = int16_t;
    static constexpr bool kRounds = true, kPacksRows = true;
    static constexpr int32_t kStored = -1;
    static constexpr int64_t kItems = 2, kAlign = kWordStep;
    static constexpr int64_t kPanelBytes = kPanelRows * (2048 + 64);
    static constexpr int64_t kInputs = kNumbers ? 32 : kWordSpan; // of a span
    static constexpr int64_t kSpan = kNumbers ? kInputs : 1;
    static constexpr int64_t kBetween = kNumbers ? 2 : 0, kBetweenRow = kNumbers ? 4 : 0;
    using Sum = float;
    static constexpr bool kZeros = false;
    static Vec less_zeros(Vec sums, Vec, Sum) { return sums; }

    template <class T>
    static void pack(const Matrix& m, const T* x, int64_t count, Item* out, float* units) {
        WordRows{m, 1, kInputs, kNumbers}.fill(x, m.inputs, count, out, units);
    }
};

template <bool kNumbers>
struct WordPanel {
    using Item = int16_t;
    using Word = WholeWord<kNumbers>;
    struct Session {};
    static constexpr bool kStarts = false;
    static constexpr int kRows = 4; // in registers with up to three groups of tokens
    // No power of two apart, and room for a vector behind the numbers.
    static int64_t pitch(int64_t deep) { return deep + deep / Word::kSpan * Word::kBetweenRow + 32; }

    static const Item* here(const Matrix&, int64_t, int64_t, int64_t, int64_t, int64_t*) { return nullptr; }

    static void bring(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n, Item* panel,
                      int64_t pitch) {
        const CodeWords codes(m, Word::kInputs);
        for (int64_t r = 0; r < rows; ++r)
            codes.bring(begin + r, from, word_inputs(n), panel + r * pitch);
        const int64_t whole = ceil_div(rows, kGroup) * kGroup;
        std::memset(panel + rows * pitch, 0, static_cast<size_t>((whole - rows) * pitch) * sizeof(Item));
    }

    static int64_t blocks(int64_t rows, int64_t words) {
        return ceil_div(rows, kRows) * ceil_div(2 * words, Word::kInputs);
    }

    static void multiply(const Pass<Item>& p) {
        const WordPass pass = {p.panel,
                               p.pitch,
                               2 * p.words,
                               p.x,
                               p.group,
                               Word::kInputs,
                               Word::kInputs * kGroup + (kNumbers ? kWordSums : 0),
                               p.first,
                               p.c,
                               p.stride,
                               p.ahead};
        for (int64_t r = 0; r < p.rows; r += kRows)
            if (p.groups == 3)
                words_block<kRows, 3, 1, kNumbers>(pass, r);
            else if (p.groups == 2)
                words_block<kRows, 2, 1, kNumbers>(pass, r);
            else
                words_block<kRows, 1, 1, kNumbers>(pass, r);
    }
};

#endif

} // namespace
} // namespace slipstream
