// Work on one row: copies between dtypes, norms, rotations.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

template <class From, class To>
inline void copy_row(const From* from, To* to, int64_t n) {
    int64_t j = 0;
    for (; j + Vec::kWidth <= n; j += Vec::kWidth)
        Vec::load(from + j).store(to + j);
    if (j < n)
        Vec::load(from + j, n - j).store(to + j, n - j);
}

// From any dtype into float32, `offset` elements on.
inline void read_row(const void* from, int32_t dtype, int64_t offset, float* to, int64_t n) {
    with_dtype(dtype, [&](auto* type) {
        copy_row(static_cast<decltype(type)>(const_cast<void*>(from)) + offset, to, n);
    });
}

inline void write_row(const float* from, void* to, int32_t dtype, int64_t offset, int64_t n) {
    with_dtype(dtype, [&](auto* type) { copy_row(from, static_cast<decltype(type)>(to) + offset, n); });
}

inline float sum_of(const float* x, int64_t n) {
    Vec sum = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth)
        sum = sum + Vec::load(x + j, least(n - j, Vec::kWidth));
    return sum.sum();
}

// Sum of squares around a mean.
inline float squares_of(const float* x, float mean, int64_t n) {
    Vec sum = Vec::set(0);
    int64_t j = 0;
    for (; j + Vec::kWidth <= n; j += Vec::kWidth) {
        const Vec d = Vec::load(x + j) - Vec::set(mean);
        sum = fma(d, d, sum);
    }
    float total = sum.sum();
    for (; j < n; ++j)
        total += (x[j] - mean) * (x[j] - mean);
    return total;
}

// x[j] = x[j] * (w[j] + offset), or plus b[j].
inline void scale_row(float* x, const void* w, int32_t dtype, int64_t at, float offset, int64_t n) {
    with_dtype(dtype, [&](auto* type) {
        const auto* weight = static_cast<decltype(type)>(const_cast<void*>(w)) + at;
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            (Vec::load(x + j, count) * (Vec::load(weight + j, count) + Vec::set(offset))).store(x + j, count);
        }
    });
}

inline void shift_row(float* x, const void* b, int32_t dtype, int64_t at, int64_t n) {
    with_dtype(dtype, [&](auto* type) {
        const auto* bias = static_cast<decltype(type)>(const_cast<void*>(b)) + at;
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            (Vec::load(x + j, count) + Vec::load(bias + j, count)).store(x + j, count);
        }
    });
}

// Normalises x into out (which may be x). Weight and bias are read from element `at` on.
inline void norm_row(const float* x, float* out, int64_t n, const Norm& norm, int64_t at = 0) {
    if (norm.kind == kNoNorm) {
        if (out != x)
            std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    const float mean = norm.kind == kLayer ? sum_of(x, n) / static_cast<float>(n) : 0.0f;
    const float factor = 1.0f / std::sqrt(squares_of(x, mean, n) / static_cast<float>(n) + norm.eps);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        ((Vec::load(x + j, count) - Vec::set(mean)) * Vec::set(factor)).store(out + j, count);
    }
    if (norm.weight)
        scale_row(out, norm.weight, norm.weight_dtype, at, norm.offset, n);
    if (norm.bias)
        shift_row(out, norm.bias, norm.bias_dtype, at, n);
}

inline void clip_row(float* x, int64_t n, float most) {
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        max(min(Vec::load(x + j, count), Vec::set(most)), Vec::set(-most)).store(x + j, count);
    }
}

// Heads of one token side by side; the norm is over each head (its weight shared or one per head) or over all
// of them.
inline void norm_heads(float* x, int64_t heads, int64_t dim, const Norm& norm, int32_t over) {
    if (norm.kind == kNoNorm)
        return;
    if (over == kWhole) {
        norm_row(x, x, heads * dim, norm);
        return;
    }
    const bool own = norm.count == heads * dim;
    for (int64_t h = 0; h < heads; ++h)
        norm_row(x + h * dim, x + h * dim, dim, norm, own ? h * dim : 0);
}

// Rotates the leading 2 * half dims of each head. Source: Su et al. 2021 (arXiv 2104.09864), eq. 34.
inline void rotate_heads(float* x, int64_t heads, int64_t dim, const float* cos, const float* sin,
                         int64_t half, bool interleaved) {
    for (int64_t h = 0; h < heads; ++h, x += dim) {
        if (interleaved) {
            for (int64_t i = 0; i < half; ++i) {
                const float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * cos[i] - b * sin[i];
                x[2 * i + 1] = b * cos[i] + a * sin[i];
            }
            continue;
        }
        for (int64_t i = 0; i < half; i += Vec::kWidth) {
            const int64_t n = least(half - i, Vec::kWidth);
            const Vec a = Vec::load(x + i, n), b = Vec::load(x + half + i, n);
            const Vec c = Vec::load(cos + i, n), s = Vec::load(sin + i, n);
            (a * c - b * s).store(x + i, n);
            (b * c + a * s).store(x + half + i, n);
        }
    }
}

} // namespace
} // namespace slipstream
