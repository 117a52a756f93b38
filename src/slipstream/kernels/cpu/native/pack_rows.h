// Packs rows with one scale each (int8, fp8) with the same operations as formats/rows.py, so that planes are
// bit-identical wherever a model is packed.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

// Rounds the mantissa of a positive number to 16 bits.
inline float sixteen_bits(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof(bits));
    bits = (bits + 0x80) & ~0xffu;
    std::memcpy(&scale, &bits, sizeof(bits));
    return scale;
}

// A row in float32.
struct Row {
    const float* x;
    int64_t n;
    float largest; // magnitude
};

// The squared errors of a row under several scales.
template <class To>
struct Errors {
    double of[To::kTargets];

    int lowest() const {
        int best = 0;
        for (int t = 1; t < To::kTargets; ++t)
            best = of[t] < of[best] ? t : best;
        return best;
    }
    // Whether all errors are finite and the lowest is below the others by more than `relative` of itself plus
    // `more`.
    bool clear(double relative, double more) const {
        const int best = lowest();
        bool clear = true;
        for (int t = 0; t < To::kTargets; ++t)
            clear =
                clear && std::isfinite(of[t]) && (t == best || of[t] - of[best] > relative * of[best] + more);
        return clear;
    }
};

constexpr int64_t kSumBlock = 64; // vectors whose squares are summed in float32

// The errors in one pass, with squares summed in float32 in blocks: off by at most 2^-17 of themselves, plus
// 2^-125 for each weight whose square is subnormal.
template <class To>
inline Errors<To> rough_errors(const Row& row, float unit, const float* scales) {
    Errors<To> errors = {};
    Vec times[To::kTargets], back[To::kTargets];
    for (int t = 0; t < To::kTargets; ++t) {
        times[t] = Vec::set(inverse(scales[t]) * (1.0f / unit) * To::kFactor);
        back[t] = Vec::set(-scales[t] * unit / To::kFactor);
    }
    for (int64_t b = 0; b < row.n; b += kSumBlock * Vec::kWidth) {
        Vec sums[To::kTargets];
        for (Vec& sum : sums)
            sum = Vec::set(0.0f);
        over(row.x, b, least(b + kSumBlock * Vec::kWidth, row.n), [&](Vec v, int64_t) {
            const Vec size = abs(v);
#pragma GCC unroll 8
            for (int t = 0; t < To::kTargets; ++t) {
                const Vec off = fma(To::nearest(size * times[t]), back[t], size);
                sums[t] = fma(off, off, sums[t]);
            }
        });
        for (int t = 0; t < To::kTargets; ++t)
            errors.of[t] += static_cast<double>(sums[t].sum());
    }
    return errors;
}

// The errors in units of `unit`, with squares in float32 summed in double, so that the order of summation
// decides only ties.
template <class To>
inline Errors<To> exact_errors(const Row& row, float unit, const float* scales) {
    Errors<To> errors = {};
    const Vec to_unit = Vec::set(1.0f / unit), factor = Vec::set(To::kFactor);
    for (int t = 0; t < To::kTargets; ++t) {
        const Vec times = Vec::set(inverse(scales[t])), back = Vec::set(scales[t] / To::kFactor);
        double sums[Vec::kWidth] = {};
        over(row.x, 0, row.n, [&](Vec v, int64_t) {
            const Vec size = abs(v) * to_unit;
            const Vec off = To::nearest(size * times * factor) * back - size;
            alignas(64) float squares[Vec::kWidth];
            (off * off).store(squares);
            for (int l = 0; l < Vec::kWidth; ++l)
                sums[l] += static_cast<double>(squares[l]);
        });
        for (const double sum : sums)
            errors.of[t] += sum;
    }
    return errors;
}

// See formats/rows.py: `fit_rows`. The rough errors decide where they are clear enough: for random weights,
// in all but one of some hundreds of rows.
template <class To>
inline float fit_row(const Row& row) {
    if (row.largest < 7.888609052210118e-31f) // 2^-100
        return 0.0f;
    int exponent;
    std::frexp(row.largest, &exponent);
    const float unit = std::ldexp(1.0f, exponent < 126 ? exponent : 126);
    float scales[To::kTargets];
    for (int t = 0; t < To::kTargets; ++t)
        scales[t] = sixteen_bits(row.largest / unit / To::kTarget[t]);
    constexpr double kTwice = 1.0 / (1 << 16), kNoNormal = 0x1p-124;
    Errors<To> errors = rough_errors<To>(row, unit, scales);
    if (!errors.clear(kTwice, kNoNormal * static_cast<double>(row.n)))
        errors = exact_errors<To>(row, unit, scales);
    return scales[errors.lowest()] * unit;
}

template <class To>
inline void encode_row(const Row& row, float scale, uint8_t* codes) {
    const Vec times = Vec::set(inverse(scale)), factor = Vec::set(To::kFactor);
    over(row.x, 0, row.n, [&](Vec v, int64_t j) {
        if (j + Vec::kWidth <= row.n) {
            To::encode(v * times * factor, codes + j);
            return;
        }
        uint8_t last[Vec::kWidth];
        To::encode(v * times * factor, last);
        std::memcpy(codes + j, last, static_cast<size_t>(row.n - j));
    });
}

// Packs one row of a format with a scale per row; `x` has room for the row.
template <class To>
inline void pack_row(const PackCall& call, int64_t r, float* x) {
    const Matrix& m = call.packed;
    const Row row = {x, m.inputs, read_row(call, r, x)};
    const float scale = fit_row<To>(row);
    static_cast<float*>(const_cast<void*>(m.planes[kFactors]))[r] = scale;
    encode_row<To>(row, scale, static_cast<uint8_t*>(const_cast<void*>(m.planes[kCodes])) + r * m.inputs);
}

} // namespace
} // namespace slipstream
