// Many rows rounded to bytes times int4. Sums are exact in int32 over a span of 32 inputs, and then
// multiplied by the span's scale. The numbers that belong to a span follow it in float32, on both sides:
//
// packed   [group][span][word][token in group]      then the sum of the span, of each token
// panel    [row][span][input]                       then the scale, and the value of code 0
#pragma once

namespace slipstream {
namespace {

// Whether rows are rounded to bytes for this: where tiles multiply bfloat16, those are as fast with the codes
// of int4.
inline bool in_grouped_codes(const Matrix& m) {
#if defined(SLIPSTREAM_BF16_DOT) && !defined(SLIPSTREAM_AMX)
    return m.input_bits && is_int4(m);
#else
    (void)m;
    return false;
#endif
}

#ifdef SLIPSTREAM_BF16_DOT
struct GroupedWord : InRegisters {
    using Item = uint8_t;
    static constexpr bool kRounds = true;
    static constexpr int32_t kStored = -1;
    static constexpr int64_t kItems = 4;
    static constexpr int64_t kSpan = 32, kBetween = 4, kBetweenRow = 8;
    static constexpr int kPadding = 128;
    using Sum = float;
    // The bytes are the codes minus 128, rather than minus the zero point; the difference, times the sum of
    // the matrix row, is subtracted from the sums.
    static Vec less_zeros(Vec sums, Vec zeros, Sum row) {
        return fma(as_floats(CodeSums::of(zeros)) - Vec::set(kPadding), Vec::set(-row), sums);
    }

    static Codes word(Vec a, Vec b, Vec c, Vec d) { return four_of(a, b, c, d); }
    // Convert a line of a group from unsigned codes, in two spans, and add the sums of the spans.
    static void part(Item* line) {
        constexpr int64_t kWords = kSpan / kItems, kBytes = kGroup * kItems;
        // Back to front: the sums of the first span shift the second.
        for (int64_t span = 1; span >= 0; --span) {
            CodeSums sums = CodeSums::of(Vec::set(0));
            Codes words[kWords];
            for (int64_t i = 0; i < kWords; ++i) {
                words[i] = less_least(Codes::load(line + (span * kWords + i) * kBytes));
                sums = dot(sums, Codes::set(1), words[i]);
            }
            Item* to = line + span * (kSpan + kBetween) * kGroup;
            for (int64_t i = 0; i < kWords; ++i)
                words[i].store(to + i * kBytes);
            as_floats(sums).store(reinterpret_cast<float*>(to + kWords * kBytes));
        }
    }
};

struct GroupedPanel {
    using Item = uint8_t;
    struct Session {};
    static constexpr bool kStarts = false;
    static constexpr int64_t kRows = 4; // of the panel, in registers with three groups of tokens
    static constexpr int64_t kSpanItems = GroupedWord::kSpan + GroupedWord::kBetweenRow;

    // The pitch is not a power of two.
    static int64_t pitch(int64_t deep) {
        return padded<GroupedWord>(deep) / GroupedWord::kSpan * kSpanItems + 64;
    }

    static const Item* here(const Matrix&, int64_t, int64_t, int64_t, int64_t, int64_t*) { return nullptr; }

    static void bring(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n, Item* panel,
                      int64_t pitch) {
        const PackedRows all(m);
        const int64_t inputs = ceil_div(m.inputs, m.group) * m.group, whole = ceil_div(rows, kGroup) * kGroup;
        const int64_t spans = padded<GroupedWord>(n) / GroupedWord::kSpan;
        for (int64_t r = 0; r < rows; ++r)
            bring_row(m, all.row(begin + r), from, inputs, spans, panel + r * pitch);
        std::memset(panel + rows * pitch, 0, static_cast<size_t>((whole - rows) * pitch));
    }

    // Return the sum of n weights of a row in a panel.
    static float sum(const Item* row, int64_t n) {
        float all = 0;
        for (int64_t k = 0; k < n; k += GroupedWord::kSpan, row += kSpanItems) {
            const int64_t here = least(GroupedWord::kSpan, n - k);
            float numbers[2];
            std::memcpy(numbers, row + GroupedWord::kSpan, sizeof(numbers));
            const Vec codes = dot(Vec::set(0), Codes::load(row, here), Codes::set(1));
            all += numbers[0] * static_cast<float>(sum_of_integers(codes)) +
                   numbers[1] * static_cast<float>(here);
        }
        return all;
    }

    static int64_t blocks(int64_t rows, int64_t) { return ceil_div(rows, kRows); }

    static void multiply(const Pass<Item>& p) {
        for (int64_t r = 0; r < p.rows; r += kRows) {
            p.ahead->some();
            if (p.groups == 3)
                block<3>(p, r);
            else if (p.groups == 2)
                block<2>(p, r);
            else
                block<1>(p, r);
        }
    }

private:
    // Copy `spans` spans of a row, from input `from` on; the planes have `inputs` inputs.
    static void bring_row(const Matrix& m, const PackedRow& row, int64_t from, int64_t inputs, int64_t spans,
                          Item* to) {
        constexpr int64_t kSpan = GroupedWord::kSpan, kAtOnce = 4;
        alignas(64) uint8_t codes[kAtOnce * kSpan];
        for (int64_t s = 0; s < spans; s += kAtOnce, from += kAtOnce * kSpan) {
            const int64_t there = most(0, least(kAtOnce * kSpan, inputs - from));
            const uint8_t* at = row.codes + from / 2;
            prefetch(at + kPackedAhead);
            Nibbles(there < kAtOnce * kSpan ? Codes::load(at, there / 2) : Codes::load(at)).store(codes);
            for (int64_t i = 0; i < least(kAtOnce, spans - s); ++i, to += kSpanItems) {
                float numbers[2] = {0, 0};
                if (i * kSpan < there) {
                    const int64_t group = (from + i * kSpan) / m.group;
                    numbers[0] = widen_one(row.scales + group);
                    numbers[1] = row.minima ? widen_one(row.minima + group) : -8 * numbers[0];
                }
                std::memcpy(to, codes + i * kSpan, kSpan);
                std::memcpy(to + kSpan, numbers, sizeof(numbers));
            }
        }
    }

    // c[r][s] = its previous value, or 0 if `first`, plus the products of rows from `row` on with S groups.
    template <int S>
    [[gnu::noinline]] static void block(const Pass<Item>& p, int64_t row) {
        constexpr int R = kRows;
        const Item *w = p.panel + row * p.pitch, *x = p.x;
        const int64_t pitch = p.pitch, group = p.group;
        float* c = p.c + row * p.stride;
        Vec sums[R][S];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s] = p.first ? Vec::set(0) : Vec::load(c + r * p.stride + s * kGroup);
        for (int64_t k = 0; k < p.words; k += GroupedWord::kSpan / GroupedWord::kItems) {
            CodeSums parts[R][S];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int s = 0; s < S; ++s)
                    parts[r][s] = CodeSums::of(Vec::set(0));
#pragma GCC unroll 2
            for (int64_t i = 0; i < GroupedWord::kSpan; i += 4, x += 4 * kGroup, w += 4) {
                Codes lanes[S];
#pragma GCC unroll 16
                for (int s = 0; s < S; ++s)
                    lanes[s] = Codes::load(x + s * group);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Codes some = Codes::spread<1>(w + r * pitch);
#pragma GCC unroll 16
                    for (int s = 0; s < S; ++s)
                        parts[r][s] = dot(parts[r][s], some, lanes[s]);
                }
            }
            const auto* numbers = reinterpret_cast<const float*>(w);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const float* here = numbers + r * (pitch / 4);
#pragma GCC unroll 16
                for (int s = 0; s < S; ++s) {
                    const Vec of_tokens = Vec::load(reinterpret_cast<const float*>(x + s * group));
                    sums[r][s] = fma(as_floats(parts[r][s]), Vec::set(here[0]), sums[r][s]);
                    sums[r][s] = fma(of_tokens, Vec::set(here[1]), sums[r][s]);
                }
            }
            x += GroupedWord::kBetween * kGroup;
            w += GroupedWord::kBetweenRow;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s].store(c + r * p.stride + s * kGroup);
    }
};
#endif

} // namespace
} // namespace slipstream
