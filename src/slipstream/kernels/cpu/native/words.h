// Rows as 16-bit integers, one or two words per number, for instruction sets without byte products in int32.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// Whether rows can be converted to words: the codes of the matrix must be integers times a scale, too.
inline bool takes_words(const Matrix& m) {
    return m.format == kInt8 || m.format == kFp6E2m3 || is_int4(m);
}

// Words per number: one for 15 bits and a sign relative to the row's largest value, two for 23 bits and a
// sign if the row is float32; rows that are rounded are integers already.
inline int words_of(const Matrix& m) {
    return m.dtype == kFloat32 && !m.input_bits ? 2 : 1;
}

constexpr float kUpperWord = 4096; // the first of two words counts multiples of this

// How a row becomes integers between `low` and `high`. They are multiples of `unit`, which is NaN if the row
// holds NaN or infinity.
struct WordGrid {
    float times, low, high, unit;

    template <class T>
    static WordGrid of(const T* x, const Matrix& m) {
        const Grid grid = grid_of(x, m.inputs, m.input_bits && m.input_zero);
        if (m.input_bits)
            return {grid.times, -grid.zero, 255 - grid.zero, grid.scale};
        const float below = words_of(m) == 2 ? 65536.0f : 256.0f;
        return {grid.times * below, -127 * below, 127 * below, grid.scale / below};
    }
    // The bounds turn NaN into an integer as well.
    Vec whole(Vec v) const { return max(min(round(v * Vec::set(times)), Vec::set(high)), Vec::set(low)); }
};

// Converts a single row to words, `stride` between the first and the second word of a number, zeros beyond
// the inputs; returns the unit.
inline float split_words(const float* x, const Matrix& m, int16_t* words, int64_t stride) {
    const WordGrid grid = WordGrid::of(x, m);
    const bool two = words_of(m) == 2;
    for (int64_t j = 0; j < stride; j += Vec::kWidth) {
        const Vec whole = grid.whole(Vec::load(x + j, most(0, least(m.inputs - j, Vec::kWidth))));
        const Vec high = two ? round(whole * Vec::set(1 / kUpperWord)) : whole;
        store_words(high, words + j);
        if (two)
            store_words(fma(high, Vec::set(-kUpperWord), whole), words + stride + j);
    }
    return grid.unit;
}

// The sums of a row, in its units, over each group of codes; zeros beyond them.
inline void sum_words(const int16_t* words, int64_t stride, int count, int64_t group, float* sums,
                      int64_t room) {
    for (int64_t g = 0; g < room; ++g) {
        int32_t all[2] = {0, 0};
        for (int i = 0; i < count; ++i)
            for (int64_t k = g * group; k < least(stride, (g + 1) * group); ++k)
                all[i] += words[i * stride + k];
        sums[g] = count == 1 ? static_cast<float>(all[0])
                             : static_cast<float>(all[0]) * kUpperWord + static_cast<float>(all[1]);
    }
}

// Several rows in one word per number are interleaved, so that a vector holds the same inputs of a group of
// rows and nothing is summed across it. A row has one lane of the vector, or W lanes that take pairs of
// inputs alternately; groups of four inputs where words are narrowed to bytes.
//
// words    [span][2 * W inputs][row in group][input]      zeros beyond the rows and the inputs
// bytes    [span][4 * W inputs][row in group][input]      likewise
// sums     [lane]                                         after each span: of the rows, in their units, in
//                                                         float32; multiplied with the minima of codes
constexpr int64_t kWordGroup = Vec::kWidth;

// Whether several rows are multiplied in words.
inline bool in_words(const Matrix& m) {
    return takes_words(m) && words_of(m) == 1;
}

// The minimum number of rows for words; two or three rows times int8 are multiplied in float32 while its
// codes are widened. Measured on a Zen 3, 576 x 1536 from memory: in float32 two rows take 0.88 of the time
// of words, four 1.12.
inline int64_t fewest_in_words(const Matrix& m) {
    constexpr int64_t kNever = INT64_MAX;
    return !in_words(m) ? kNever : (m.format == kInt8 && !m.input_bits ? 4 : 2);
}

constexpr int64_t kWordStep = 64;             // rows are padded to a multiple of this
constexpr int64_t kWordSums = 2 * kWordGroup; // words taken by the sums after a span
// Inputs whose products are summed as integers where codes have no groups: more than 512 would overflow
// int32.
constexpr int64_t kWordSpan = 128;

inline int64_t word_inputs(int64_t inputs) {
    return ceil_div(inputs, kWordStep) * kWordStep;
}

// Whether the words of rows are narrowed to bytes.
inline bool in_fours(const Matrix& m) {
#ifdef SLIPSTREAM_FOURS
    return is_int4(m) && m.input_bits && !m.input_zero;
#else
    (void)m;
    return false;
#endif
}
constexpr int64_t kFourSpan = 32; // inputs whose products are summed in sixteen bits

// Whether a few rows are multiplied row by row instead of in lanes, see few_words.h. Not measured with
// vectors of 64 bytes, which use the limits of the baseline.
inline bool in_words_by_rows(const Matrix& m, int64_t rows) {
    if (rows < 2 || !takes_words(m) || in_fours(m))
        return false;
    constexpr bool kAvx2 = Vec::kWidth == 8;
    if (words_of(m) == 2)
        return m.format != kInt8 && rows <= (kAvx2 ? 6 : 3);
    if (m.format == kInt8)
        return kAvx2 ? rows >= 3 && rows <= 6 : Vec::kWidth < 8 && rows <= 4;
    return rows <= (!kAvx2 ? 3 : is_int4(m) ? 6 : 4);
}

// The layout of one group of at most kWordGroup / lanes rows. The inputs of a span, which divides kWordSpan,
// are summed as integers.
struct WordRows {
    const Matrix& m;
    int64_t lanes, span;
    bool has_sums;
    bool fours = in_fours(m);

    int64_t places() const { return kWordGroup / lanes; }
    // Words between spans.
    int64_t apart() const { return (fours ? span / 2 : span) * places() + (has_sums ? kWordSums : 0); }

    // Converts `count` rows; `units` receives the unit of each row.
    template <class T>
    void fill(const T* x, int64_t stride, int64_t count, int16_t* out, float* units) const {
        constexpr int64_t kDeep = 4 * kWordSpan, kPitch = kDeep + 32; // not a power of two
        alignas(64) int16_t rows[kWordGroup * kPitch];
        const int64_t empty = (places() - count) * kPitch;
        std::memset(rows + count * kPitch, 0, static_cast<size_t>(empty) * sizeof(*rows));
        WordGrid grids[kWordGroup];
        for (int64_t i = 0; i < places(); ++i) {
            if (i < count)
                grids[i] = WordGrid::of(x + i * stride, m);
            units[i] = i < count ? grids[i].unit : 0;
        }
        const int64_t width = word_inputs(m.inputs);
        for (int64_t k = 0; k < width; k += kDeep) {
            const int64_t deep = least(kDeep, width - k);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < deep; j += Vec::kWidth) {
                    const int64_t n = most(0, least(m.inputs - k - j, Vec::kWidth));
                    store_words(grids[i].whole(Vec::load(x + i * stride + k + j, n)), rows + i * kPitch + j);
                }
            for (int64_t j = 0; j < deep; j += span, out += apart()) {
                const int64_t n = least(span, deep - j);
                fours ? turn_bytes(rows + j, kPitch, out) : turn(rows + j, kPitch, n, out);
                if (has_sums)
                    sum(rows + j, kPitch, n, reinterpret_cast<float*>(out + apart() - kWordSums));
            }
        }
    }

private:
    void turn(const int16_t* from, int64_t pitch, int64_t n, int16_t* out) const {
        if (lanes == 1) {
            for (int64_t j = 0; j < n; j += 2 * kWordGroup)
                transpose(reinterpret_cast<const float*>(from + j), pitch / 2,
                          reinterpret_cast<float*>(out + j * kWordGroup), kWordGroup);
            return;
        }
        const int64_t step = 2 * lanes;
        for (int64_t j = 0; j < n; j += step)
            for (int64_t i = 0; i < places(); ++i, out += step)
                std::memcpy(out, from + i * pitch + j, static_cast<size_t>(step) * sizeof(*from));
    }

    // One span of kFourSpan inputs.
    void turn_bytes([[maybe_unused]] const int16_t* from, [[maybe_unused]] int64_t pitch,
                    [[maybe_unused]] int16_t* out) const {
#ifdef SLIPSTREAM_FOURS
        alignas(64) int8_t bytes[kWordGroup][kFourSpan];
        for (int64_t i = 0; i < places(); ++i)
            narrow_words(from + i * pitch, bytes[i]);
        turn(reinterpret_cast<const int16_t*>(bytes), kFourSpan / 2, kFourSpan / 2, out);
#endif
    }

    // The sum of each row goes to its first lane.
    void sum(const int16_t* from, int64_t pitch, int64_t n, float* sums) const {
        int16_t ones[Words::kWidth];
        for (int16_t& one : ones)
            one = 1;
        for (int64_t i = 0; i < places(); ++i) {
            WordSums all;
            for (int64_t j = 0; j < n; j += Words::kWidth)
                all = dot(all, Words::load(from + i * pitch + j), Words::load(ones));
            sums[i * lanes] = WordTotals::of(all).sum();
            for (int64_t l = 1; l < lanes; ++l)
                sums[i * lanes + l] = 0;
        }
    }
};

// The layout of rows in lanes: whole groups (`wide` rows), and the rows left over (`narrow`) with several
// lanes each.
struct WordLanes {
    WordLanes(const Matrix& m, int64_t rows)
        : span(in_fours(m) ? kFourSpan : (m.group ? m.group : kWordSpan)), numbers(m.group > 0) {
        const int64_t left = rows % kWordGroup;
        wide = left > kWordGroup / 2 ? rows : rows - left;
        narrow = rows - wide;
        while (narrow && lanes < 4 && kWordGroup / (2 * lanes) >= narrow)
            lanes *= 2;
        group = ceil_div(word_inputs(m.inputs), span) * WordRows{m, 1, span, true}.apart();
    }
    int64_t groups() const { return ceil_div(wide, kWordGroup) + (narrow > 0); }
    // Bytes for the words and units of `rows` rows, for any matrix.
    static int64_t bytes(int64_t inputs, int64_t rows) {
        const int64_t words = ceil_div(inputs, kWordSpan) * kWordSpan;
        const int64_t row = (words + words / 32 * 2) * static_cast<int64_t>(sizeof(int16_t)) + 4;
        return ceil_div(rows, kWordGroup) * kWordGroup * row;
    }
    int64_t span, wide, narrow, lanes = 1, group;
    bool numbers;
};

#endif

// Loads a vector of a row's scales or minima, of which `left` belong to the row. `beyond`: whether others
// follow in memory; else the rest are zeros. Prefetches those of the codes `ahead` bytes further on.
[[gnu::always_inline]] inline Vec some_numbers(const Half* p, int64_t left, bool beyond, int64_t ahead) {
    prefetch(reinterpret_cast<const char*>(p) + ahead / 8);
    return beyond || left >= Vec::kWidth ? Vec::load(p) : Vec::load(p, left);
}

} // namespace
} // namespace slipstream
