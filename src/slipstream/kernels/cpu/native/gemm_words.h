// Many rows in words times a packed matrix with integer codes, for units without byte products: a panel holds
// the codes as words, so that one instruction replaces two products in float32. Sums are exact in int32 over
// a span of inputs.
//
// packed   [group][span][pair of inputs][token in group][input]
//          with formats that have groups, then the sum of the span of each token, in float32
// panel    [row][input], with the numbers that CodeWords adds per span
//
// Measured on a Zen 3 with AVX2, one thread, 512 rows and 1536 x 576, relative to products in float32: int8
// takes 0.67 of the time, int4 and fp6 0.80.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// P: the contents of a lane, see Pairs and Fours. If the codes have groups, a span is the smallest group.
template <class P>
struct WholeWord : InRegisters {
    using Item = typename std::conditional<P::kInputs == 4, uint8_t, int16_t>::type;
    static constexpr bool kRounds = true, kPacksRows = true;
    static constexpr int32_t kStored = -1;
    static constexpr int64_t kSize = sizeof(Item);
    static constexpr int64_t kItems = 4 / kSize, kAlign = kWordStep;
    static constexpr int64_t kPanelBytes = kPanelRows * (2048 + 64);
    static constexpr int64_t kInputs = P::kNumbers ? 32 : kWordSpan; // per span
    static constexpr int64_t kSpan = P::kNumbers ? kInputs : 1;
    static constexpr int64_t kBetween = P::kNumbers ? 4 / kSize : 0, kBetweenRow = 2 * kBetween;
    using Sum = float;
    static constexpr bool kZeros = false;
    static Vec less_zeros(Vec sums, Vec, Sum) { return sums; }

    template <class T>
    static void pack(const Matrix& m, const T* x, int64_t count, Item* out, float* units) {
        const WordRows rows = {m, 1, kInputs, P::kNumbers};
        rows.fill(x, m.inputs, count, reinterpret_cast<int16_t*>(out), units);
    }
};

template <class P>
struct WordPanel {
    using Word = WholeWord<P>;
    using Item = typename Word::Item;
    struct Session {};
    static constexpr bool kStarts = false;
    static constexpr int kRows = 4; // in registers with up to three groups of tokens
    // The pitch is not a power of two, and leaves room for a vector behind the numbers.
    static int64_t pitch(int64_t deep) {
        return deep + deep / Word::kSpan * Word::kBetweenRow + 64 / Word::kSize;
    }

    static const Item* here(const Matrix&, int64_t, int64_t, int64_t, int64_t, int64_t*) { return nullptr; }

    static void bring(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n, Item* panel,
                      int64_t pitch) {
        CodeWords<P> codes(m, Word::kInputs);
        codes.begin(from, word_inputs(n));
        for (int64_t r = 0; r < rows; ++r)
            codes.bring(begin + r, reinterpret_cast<int16_t*>(panel + r * pitch));
        const int64_t whole = ceil_div(rows, kGroup) * kGroup;
        std::memset(panel + rows * pitch, 0, static_cast<size_t>((whole - rows) * pitch) * sizeof(Item));
    }

    static int64_t blocks(int64_t rows, int64_t words) {
        return ceil_div(rows, kRows) * ceil_div(Word::kItems * words, Word::kInputs);
    }

    static void multiply(const Pass<Item>& p) {
        constexpr int64_t kParts = 2 / Word::kSize; // of a word
        const WordPass pass = {reinterpret_cast<const int16_t*>(p.panel),
                               p.pitch / kParts,
                               Word::kItems * p.words,
                               reinterpret_cast<const int16_t*>(p.x),
                               p.group / kParts,
                               Word::kInputs,
                               Word::kInputs / kParts * kGroup + (P::kNumbers ? kWordSums : 0),
                               p.first,
                               p.c,
                               p.stride,
                               p.ahead};
        for (int64_t r = 0; r < p.rows; r += kRows)
            if (p.groups == 3)
                words_block<P, kRows, 3, 1>(pass, r);
            else if (p.groups == 2)
                words_block<P, kRows, 2, 1>(pass, r);
            else
                words_block<P, kRows, 1, 1>(pass, r);
    }
};

#endif

} // namespace
} // namespace slipstream
