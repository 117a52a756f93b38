// Packs rows with one scale each (int8, fp8): the same operations as formats/rows.py and minifloat.py.
// Sums of whole rows are in double, where their order decides nothing but ties.
#pragma once

#include <cmath>
#include <limits>

namespace slipstream {
namespace {

inline float inverse(float scale) {
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

// How numbers of one format are rounded: to integers of at most `largest`, or, where `shift` is not 0, by way
// of float16 (see formats/minifloat.py) to codes of at most `largest` beside the sign.
struct Rounding {
    int shift, sign;
    uint16_t largest;
    float factor;
    int num_targets;
    float targets[6];
};

inline Rounding rounding_of(int32_t format) {
    switch (format) {
    case kFp8:
        return {7, 7, 0x7e, 1.0f / 256, 4, {448.0f, 384.0f, 320.0f, 256.0f}};
    case kFp6E2m3:
        return {7, 5, 31, 1.0f / 16384, 6, {7.5f, 7.0f, 6.5f, 6.0f, 5.5f, 5.0f}};
    case kFp6E3m2:
        return {8, 5, 31, 1.0f / 4096, 4, {28.0f, 24.0f, 20.0f, 16.0f}};
    default:
        return {0, 0, 127, 1.0f, 3, {127.0f, 127.25f, 127.5f, 0.0f}};
    }
}

constexpr int64_t kPackBlock = 256; // weights of a row at a time, a multiple of every width

// Each of n numbers to the nearest that has a code, but for a factor; with `codes`, what that is.
inline void round_halves(const Rounding& to, Half* halves, int64_t n, uint8_t* codes) {
    const int shift = to.shift, sign = to.sign, largest = to.largest, half_step = (1 << (shift - 1)) - 1;
    for (int64_t j = 0; j < n; ++j) {
        const int bits = halves[j].bits, size = bits & 0x7fff;
        const int code = (size + ((size >> shift) & 1) + half_step) >> shift;
        halves[j].bits = static_cast<uint16_t>((code < largest ? code : largest) << shift | (bits & 0x8000));
    }
    for (int64_t j = 0; codes && j < n; ++j) {
        const int bits = halves[j].bits;
        codes[j] = static_cast<uint8_t>((bits & 0x7fff) >> shift | (bits >> 15) << sign);
    }
}

// codes[j] of x[j] * factor; with values, what they stand for.
inline void round_block(const Rounding& to, const float* x, float factor, int64_t n, uint8_t* codes,
                        float* values) {
    alignas(64) float room[kPackBlock];
    float* scaled = values ? values : room;
    alignas(64) Half halves[kPackBlock];
    const Vec by = Vec::set(factor), most_code = Vec::set(to.largest), back = Vec::set(1.0f / to.factor);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        const Vec v = Vec::load(x + j, count) * by;
        if (!to.shift) {
            const Vec rounded = max(min(round(v), most_code), Vec::set(0.0f) - most_code);
            rounded.store(scaled + j);
        } else {
            (v * Vec::set(to.factor)).store(halves + j);
        }
    }
    if (!to.shift) {
        for (int64_t j = 0; codes && j < n; ++j)
            codes[j] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int>(scaled[j])));
        return;
    }
    round_halves(to, halves, n, codes);
    for (int64_t j = 0; values && j < n; j += Vec::kWidth)
        (Vec::load(halves + j) * back).store(values + j);
}

// The largest magnitude of a row: side by side, for one after the other each waits for the one before.
inline float largest_of(const float* x, int64_t n) {
    Vec most = Vec::set(0.0f);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const Vec v = Vec::load(x + j, least(n - j, Vec::kWidth));
        most = max(most, max(v, Vec::set(0.0f) - v));
    }
    return most.highest();
}

// See formats/rows.py: `fit_rows`.
inline float fit_row(const Rounding& to, const float* x, int64_t n, float* unit_row) {
    float largest = largest_of(x, n);
    largest = largest < 7.888609052210118e-31f ? 0.0f : largest; // 2^-100
    int exponent;
    std::frexp(largest, &exponent);
    const float unit = std::ldexp(1.0f, exponent < 126 ? exponent : 126), back = 1.0f / unit;
    for (int64_t j = 0; j < n; ++j)
        unit_row[j] = x[j] * back;
    largest /= unit;
    float best = 0.0f;
    double least_error = std::numeric_limits<double>::infinity();
    alignas(64) float values[kPackBlock];
    for (int t = 0; t < to.num_targets; ++t) {
        float scale = largest / to.targets[t];
        uint32_t bits;
        std::memcpy(&bits, &scale, 4);
        bits = (bits + 0x80) & ~0xffu; // 16 bits of mantissa
        std::memcpy(&scale, &bits, 4);
        double sums[16] = {};
        for (int64_t b = 0; b < n; b += kPackBlock) {
            const int64_t count = least(kPackBlock, n - b);
            round_block(to, unit_row + b, inverse(scale), count, nullptr, values);
            for (int64_t j = 0; j < count; ++j) {
                const float off = values[j] * scale - unit_row[b + j];
                values[j] = off * off;
            }
            for (int64_t j = count; j % 16; ++j)
                values[j] = 0.0f;
            for (int64_t j = 0; j < count; j += 16)
                for (int64_t l = 0; l < 16; ++l)
                    sums[l] += static_cast<double>(values[j + l]);
        }
        double error = 0.0;
        for (const double sum : sums)
            error += sum;
        if (error < least_error) {
            best = scale;
            least_error = error;
        }
    }
    return best * unit;
}

// One row of a format with a scale per row; `x` has room for two rows.
inline void pack_row(const PackCall& call, int64_t r, float* x) {
    const Matrix& m = call.packed;
    const Rounding to = rounding_of(m.format);
    read_row(call.dense, call.dtype, r * call.stride, x, m.inputs);
    const float scale = fit_row(to, x, m.inputs, x + m.inputs);
    static_cast<float*>(const_cast<void*>(m.planes[kFactors]))[r] = scale;
    auto* codes = static_cast<uint8_t*>(const_cast<void*>(m.planes[kCodes])) + r * m.inputs;
    for (int64_t b = 0; b < m.inputs; b += kPackBlock)
        round_block(to, x + b, inverse(scale), least(kPackBlock, m.inputs - b), codes + b, nullptr);
}

} // namespace
} // namespace slipstream
