// A row as whole numbers of sixteen bits, one or two for each, for units that have no products of bytes.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// Whether a single row becomes words.
inline bool takes_words(const Matrix& m) {
    return m.format == kInt8 || m.format == kFp6E2m3 || is_int4(m);
}

// Words of a number: 15 bits and a sign beside the row's largest, or 23 where the row is in float32; rows
// that are rounded are whole numbers already.
inline int words_of(const Matrix& m) {
    return m.dtype == kFloat32 && !m.input_bits ? 2 : 1;
}

constexpr float kUpperWord = 4096; // what the first of two words is a multiple of

// The row in words, `stride` between the first and the second of each, and zeros behind the inputs; returns
// what they are multiples of. That is NaN where the row holds NaN or infinity.
inline float split_words(const float* x, const Matrix& m, int16_t* words, int64_t stride) {
    const Grid grid = grid_of(x, m.inputs, m.input_bits && m.input_zero);
    const bool two = words_of(m) == 2;
    const float below = m.input_bits ? 1.0f : (two ? 65536.0f : 256.0f);
    const Vec times = Vec::set(grid.times * below), top = Vec::set(127 * below);
    for (int64_t j = 0; j < stride; j += Vec::kWidth) {
        const Vec some = Vec::load(x + j, most(0, least(m.inputs - j, Vec::kWidth)));
        alignas(64) float upper[Vec::kWidth], lower[Vec::kWidth];
        Vec whole = round(some * times);
        if (m.input_bits)
            whole = max(min(whole, Vec::set(255 - grid.zero)), Vec::set(-grid.zero));
        else // which makes whole numbers of NaN as well
            whole = max(min(whole, top), Vec::set(0) - top);
        const Vec high = two ? round(whole * Vec::set(1 / kUpperWord)) : whole;
        high.store(upper);
        fma(high, Vec::set(-kUpperWord), whole).store(lower);
        for (int i = 0; i < Vec::kWidth; ++i)
            words[j + i] = static_cast<int16_t>(upper[i]);
        for (int i = 0; two && i < Vec::kWidth; ++i)
            words[stride + j + i] = static_cast<int16_t>(lower[i]);
    }
    return grid.scale / below;
}

// The sums of the row, in its units, over each group of codes; zeros behind them.
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

#endif

} // namespace
} // namespace slipstream
