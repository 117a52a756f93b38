// Activations whose results are rounded to bfloat16 immediately: their errors are far below that rounding,
// and they take a third of the time.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT
// x times the normal distribution function, which is constant beyond 4.45; the absolute error is below 6e-5.
// The coefficients minimise the error, found by linear programming over Chebyshev polynomials.
inline Vec gelu_rounded(Vec x) {
    const Vec half = Vec::set(0.5f), less_half = Vec::set(-0.5f);
    const Vec bounded = max(min(x, Vec::set(4.45f)), Vec::set(-4.45f)), z = bounded * bounded;
    Vec p = Vec::set(2.99779958e-11f);
    p = fma(p, z, Vec::set(-3.26336425e-9f));
    p = fma(p, z, Vec::set(1.56646635e-7f));
    p = fma(p, z, Vec::set(-4.3936775e-6f));
    p = fma(p, z, Vec::set(8.06732642e-5f));
    p = fma(p, z, Vec::set(-1.03217235e-3f));
    p = fma(p, z, Vec::set(9.56444722e-3f));
    p = fma(p, z, Vec::set(-6.59476421e-2f));
    p = fma(p, z, Vec::set(3.9869085e-1f));
    return x * (max(min(bounded * p, half), less_half) + half);
}

// x / (1 + 2^-p), with a relative error below 2e-4.
inline Vec times_logistic(Vec x, Vec p) {
    return x * near_reciprocal(power<4>(Vec::set(0.0f) - p) + Vec::set(1.0f));
}

inline Vec activate_rounded(int32_t kind, Vec x) {
    switch (kind) {
    case kGelu:
        return gelu_rounded(x);
    case kGeluTanh: // (1 + tanh u) / 2 is the logistic function of 2 u
        return times_logistic(x, Vec::set(2.0f * kLog2E * 0.79788456080286536f) *
                                     fma(Vec::set(0.044715f) * x * x, x, x));
    case kQuickGelu:
        return times_logistic(x, Vec::set(1.702f * kLog2E) * x);
    case kSilu:
        return times_logistic(x, Vec::set(kLog2E) * x);
    default:
        return activate(kind, x);
    }
}
#endif

// Like `activate_row`, for values that are rounded to bfloat16 next.
inline void activate_rounded_row(int32_t kind, float* x, const float* up, int64_t n) {
#ifdef SLIPSTREAM_BF16_DOT
    if (kind != kSwigluOai) {
        int64_t j = 0;
        for (; j + Vec::kWidth <= n; j += Vec::kWidth) {
            const Vec g = activate_rounded(kind, Vec::load(x + j));
            (up ? g * Vec::load(up + j) : g).store(x + j);
        }
        if (j < n) {
            const Vec g = activate_rounded(kind, Vec::load(x + j, n - j));
            (up ? g * Vec::load(up + j, n - j) : g).store(x + j, n - j);
        }
        return;
    }
#endif
    activate_row(kind, x, up, n);
}

} // namespace
} // namespace slipstream
