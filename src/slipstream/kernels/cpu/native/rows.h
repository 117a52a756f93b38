// Operations on one row: copies between dtypes, norms, rotations.
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

// Converts a row of any dtype to float32, starting `offset` elements on.
inline void read_row(const void* from, int32_t dtype, int64_t offset, float* to, int64_t n) {
    with_dtype(dtype, [&](auto* type) {
        copy_row(static_cast<decltype(type)>(const_cast<void*>(from)) + offset, to, n);
    });
}

// Reads row `o` of a dense matrix that is not transposed.
inline void read_row(const Matrix& m, int64_t o, float* to) {
    const Run* run = m.runs;
    for (; o >= run->rows; ++run)
        o -= run->rows;
    read_row(run->data, m.dtype, o * run->stride, to, m.inputs);
}

inline void write_row(const float* from, void* to, int32_t dtype, int64_t offset, int64_t n) {
    with_dtype(dtype, [&](auto* type) { copy_row(from, static_cast<decltype(type)>(to) + offset, n); });
}

// The sum over a row, where add(sum, v) adds a vector's contribution; independent chains, a partial vector is
// padded with zeros.
template <class F>
inline float sum_over(const float* x, int64_t n, F add) {
    Vec sums[4] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};
    int64_t j = 0;
    for (; j + 4 * Vec::kWidth <= n; j += 4 * Vec::kWidth)
        for (int i = 0; i < 4; ++i)
            sums[i] = add(sums[i], Vec::load(x + j + i * Vec::kWidth));
    for (; j + Vec::kWidth <= n; j += Vec::kWidth)
        sums[0] = add(sums[0], Vec::load(x + j));
    float total = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
    if (j < n) {
        alignas(64) float last[Vec::kWidth] = {}, sum[Vec::kWidth];
        std::memcpy(last, x + j, static_cast<size_t>(n - j) * sizeof(float));
        add(Vec::set(0), Vec::load(last)).store(sum);
        for (int64_t i = 0; i < n - j; ++i)
            total += sum[i];
    }
    return total;
}

inline float product_of(const float* x, const float* y, int64_t n) {
    Vec sums[4] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};
    int64_t j = 0;
    for (; j + 4 * Vec::kWidth <= n; j += 4 * Vec::kWidth)
        for (int i = 0; i < 4; ++i)
            sums[i] = fma(Vec::load(x + j + i * Vec::kWidth), Vec::load(y + j + i * Vec::kWidth), sums[i]);
    for (; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        sums[0] = fma(Vec::load(x + j, count), Vec::load(y + j, count), sums[0]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

inline float sum_of(const float* x, int64_t n) {
    return sum_over(x, n, [](Vec sum, Vec v) { return sum + v; });
}

// The sum of squared differences from a mean.
inline float squares_of(const float* x, float mean, int64_t n) {
    const Vec middle = Vec::set(mean);
    return sum_over(x, n, [&](Vec sum, Vec v) {
        const Vec d = v - middle;
        return fma(d, d, sum);
    });
}

// x[j] = x[j] + b[j].
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
    const Vec middle = Vec::set(mean), times = Vec::set(factor), offset = Vec::set(norm.offset);
    const auto over = [&](auto f) {
        int64_t j = 0;
        for (; j + Vec::kWidth <= n; j += Vec::kWidth)
            f(Vec::load(x + j), j, std::true_type()).store(out + j);
        if (j < n)
            f(Vec::load(x + j, n - j), j, std::false_type()).store(out + j, n - j);
    };
    if (!norm.weight)
        over([&](Vec v, int64_t, auto) { return (v - middle) * times; });
    else
        with_dtype(norm.weight_dtype, [&](auto* type) {
            const auto* weight = static_cast<decltype(type)>(const_cast<void*>(norm.weight)) + at;
            over([&](Vec v, int64_t j, auto whole) {
                const Vec w = whole.value ? Vec::load(weight + j) : Vec::load(weight + j, n - j);
                return (v - middle) * times * (w + offset);
            });
        });
    if (norm.bias)
        shift_row(out, norm.bias, norm.bias_dtype, at, n);
}

// out = residual + factor * scale * branch.
inline void add_row(float* out, const float* residual, const float* branch, int64_t n, float factor,
                    const Scale& scale) {
    const auto sum = [&](auto times) {
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            fma(Vec::load(branch + j, count), times(j, count), Vec::load(residual + j, count))
                .store(out + j, count);
        }
    };
    const Vec all = Vec::set(factor);
    if (!scale.weight)
        return sum([&](int64_t, int64_t) { return all; });
    with_dtype(scale.dtype, [&](auto* type) {
        const auto* weight = static_cast<decltype(type)>(const_cast<void*>(scale.weight));
        sum([&](int64_t j, int64_t count) { return all * Vec::load(weight + j, count); });
    });
}

inline float number_at(const void* from, int32_t dtype, int64_t index) {
    float number;
    read_row(from, dtype, index, &number, 1);
    return number;
}

// x = x * factor.
inline void multiply_row(float* x, int64_t n, float number) {
    const Vec factor = Vec::set(number);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        (Vec::load(x + j, count) * factor).store(x + j, count);
    }
}

// x = x * the number that a scale holds, if any.
inline void scale_row(float* x, int64_t n, const Scale& scale) {
    if (scale.weight)
        multiply_row(x, n, number_at(scale.weight, scale.dtype, 0));
}

// Clips a row to [-most, most]. The data is the second operand of min and max, so NaN stays NaN.
inline void clip_row(float* x, int64_t n, float most) {
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        max(Vec::set(-most), min(Vec::set(most), Vec::load(x + j, count))).store(x + j, count);
    }
}

// Norms the heads of one token, which are contiguous: each head separately (its weight shared or one per
// head) or all of them together.
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
