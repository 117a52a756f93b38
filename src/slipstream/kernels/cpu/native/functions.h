// Vectorized exponential, hyperbolic tangent and activations.
#pragma once

namespace slipstream {
namespace {

// e^x with a relative error below 2e-7; zero for x below -87.3, and x is capped at 88. NaN stays NaN, because
// the bounds are the first operands of max and min.
// Source: Cephes expf (Moshier), a polynomial of degree 5 on [-ln 2 / 2, ln 2 / 2].
inline Vec exponential(Vec x) {
    const Vec bounded = max(Vec::set(-87.3f), min(Vec::set(88.0f), x));
    const Vec n = round(bounded * Vec::set(1.44269504088896341f));
    Vec r = fma(n, Vec::set(-0.693359375f), bounded);
    r = fma(n, Vec::set(2.12194440e-4f), r);
    Vec p = Vec::set(1.9875691500e-4f);
    p = fma(p, r, Vec::set(1.3981999507e-3f));
    p = fma(p, r, Vec::set(8.3334519073e-3f));
    p = fma(p, r, Vec::set(4.1665795894e-2f));
    p = fma(p, r, Vec::set(1.6666665459e-1f));
    p = fma(p, r, Vec::set(5.0000001201e-1f));
    p = fma(p, r * r, r + Vec::set(1.0f));
    return if_less(x, Vec::set(-87.3f), Vec::set(0.0f), p * power_of_two(n));
}

// Hyperbolic tangent. Source: Cephes tanhf (Moshier).
inline Vec tangent(Vec x) {
    const Vec one = Vec::set(1.0f), size = abs(x), z = x * x;
    Vec p = Vec::set(-5.70498872745e-3f);
    p = fma(p, z, Vec::set(2.06390887954e-2f));
    p = fma(p, z, Vec::set(-5.37397155531e-2f));
    p = fma(p, z, Vec::set(1.33314422036e-1f));
    p = fma(p, z, Vec::set(-3.33332819422e-1f));
    const Vec near = fma(p * z, x, x);
    const Vec far = one - Vec::set(2.0f) / (exponential(size + size) + one);
    return if_less(size, Vec::set(0.625f), near, if_less(x, Vec::set(0.0f), Vec::set(0.0f) - far, far));
}

inline Vec sigmoid(Vec x) {
    const Vec one = Vec::set(1.0f), zero = Vec::set(0.0f);
    // `exponential` stops at e^88, whose inverse times a huge x would not be 0.
    return if_less(x, Vec::set(-88.0f), zero, one / (one + exponential(zero - x)));
}

// x times the normal distribution function. Source: Abramowitz and Stegun 1964, 7.1.26, error below 1.5e-7.
inline Vec gelu(Vec x) {
    const Vec z = abs(x) * Vec::set(0.70710678118654752f), one = Vec::set(1.0f);
    const Vec t = one / fma(z, Vec::set(0.3275911f), one);
    Vec p = Vec::set(1.061405429f);
    p = fma(p, t, Vec::set(-1.453152027f));
    p = fma(p, t, Vec::set(1.421413741f));
    p = fma(p, t, Vec::set(-0.284496736f));
    p = fma(p, t, Vec::set(0.254829592f));
    const Vec beyond = Vec::set(0.5f) * p * t * exponential(Vec::set(0.0f) - z * z);
    return x * if_less(x, Vec::set(0.0f), beyond, one - beyond);
}

inline Vec gelu_tanh(Vec x) {
    const Vec inner = Vec::set(0.79788456080286536f) * fma(Vec::set(0.044715f) * x * x, x, x);
    return Vec::set(0.5f) * x * (Vec::set(1.0f) + tangent(inner));
}

// x tanh(ln(1 + e^x)); e^x is capped where the factor is one.
inline Vec mish(Vec x) {
    const Vec e = exponential(min(x, Vec::set(20.0f))), two = Vec::set(2.0f);
    const Vec square = e * (e + two);
    return x * (square / (square + two));
}

inline Vec activate(int32_t kind, Vec x) {
    const Vec zero = Vec::set(0.0f);
    switch (kind) {
    case kGelu:
        return gelu(x);
    case kGeluTanh:
        return gelu_tanh(x);
    case kQuickGelu:
        return x * sigmoid(Vec::set(1.702f) * x);
    case kSilu:
        return x * sigmoid(x);
    case kRelu:
        return max(zero, x);
    case kRelu2: {
        const Vec positive = max(zero, x);
        return positive * positive;
    }
    case kRelu6:
        return min(Vec::set(6.0f), max(zero, x));
    case kLeakyRelu:
        return if_less(x, zero, Vec::set(0.01f) * x, x);
    case kMish:
        return mish(x);
    case kTanh:
        return tangent(x);
    case kSigmoid:
        return sigmoid(x);
    default:
        return x;
    }
}

// x = f(x), or f(x) * up, over n values.
inline void activate_row(int32_t kind, float* x, const float* up, int64_t n) {
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        Vec g = Vec::load(x + j, count);
        if (kind == kSwigluOai) {
            // The input is the second operand, which min and max return if either is NaN.
            const Vec limit = Vec::set(7.0f), bounded = min(limit, g);
            const Vec u = max(Vec::set(-7.0f), min(limit, Vec::load(up + j, count)));
            g = (u + Vec::set(1.0f)) * (bounded * sigmoid(bounded * Vec::set(1.702f)));
        } else {
            g = activate(kind, g);
            if (up)
                g = g * Vec::load(up + j, count);
        }
        g.store(x + j, count);
    }
}

// Multiplies heads by the factors of a gate, which has one input per head or per channel.
inline void open_heads(int32_t gate, bool per_head, float* x, const float* opening, int64_t heads,
                       int64_t dim) {
    const auto factor = [&](Vec v, int64_t n) {
        if (gate == kSigmoidGate)
            return sigmoid(v);
        alignas(64) float values[Vec::kWidth];
        v.store(values, n);
        for (int64_t i = 0; i < n; ++i)
            values[i] = std::fmax(values[i], 0.0f) + std::log1p(std::exp(-std::fabs(values[i])));
        return Vec::load(values, n);
    };
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < dim; j += Vec::kWidth) {
            const int64_t n = least(dim - j, Vec::kWidth);
            const Vec given = per_head ? Vec::set(opening[h]) : Vec::load(opening + h * dim + j, n);
            float* at = x + h * dim + j;
            (Vec::load(at, n) * factor(given, n)).store(at, n);
        }
}

} // namespace
} // namespace slipstream
