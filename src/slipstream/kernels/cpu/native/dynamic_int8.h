// Dynamic rounding of input rows to eight bits before a matrix product: each row to its own grid of 255 or
// 256 values. Units with byte products use the codes, others floats on the grid.
//
// Source: the docstring of `Rounding` in ops/linear.py; the operations are the same, in the same order.
#pragma once

namespace slipstream {
namespace {

// Input rows of a product: in float32 and, if the matrix is in bfloat16 (or packed and would be unpacked to
// it) and there are several rows, also rounded to bfloat16.
struct Rows {
    const float* full;
    const Bf16* rounded; // null if not needed
    int64_t stride, count;
    Rows from(int64_t first) const {
        return {full + first * stride, rounded ? rounded + first * stride : nullptr, stride, count - first};
    }
};

// A quantization grid: a code is round(x * times) + zero, and represents (code - zero) * scale.
struct Grid {
    float times, scale, zero;
};

// Return the grid of a row with values from -bottom to top, including 0. `odd` is 0, or NaN if the row holds
// NaN or infinity; the scale is then NaN.
inline Grid grid_between(float bottom, float top, float odd, bool with_zero) {
    constexpr float kLeast = 7.888609052210118e-31f; // 2^-100: rows with a smaller range count as zeros
    const float steps = with_zero ? 255.0f : 127.0f;
    const float range = with_zero ? top + bottom : (top > bottom ? top : bottom);
    const float times = range >= kLeast ? steps / range : 0.0f;
    const float zero = with_zero ? round(Vec::set(bottom * times)).highest() : 128.0f;
    return {times, range / steps + odd, zero};
}

template <class T>
inline Grid grid_of(const T* x, int64_t n, bool with_zero) {
    Vec lows[2] = {Vec::set(0), Vec::set(0)}, highs[2] = {Vec::set(0), Vec::set(0)};
    Vec odd = Vec::set(0);
    const auto look = [&](Vec v, int i) {
        lows[i] = min(v, lows[i]);
        highs[i] = max(v, highs[i]);
        odd = fma(v, Vec::set(0), odd);
    };
    int64_t j = 0;
    for (; j + 2 * Vec::kWidth <= n; j += 2 * Vec::kWidth) {
        look(Vec::load(x + j), 0);
        look(Vec::load(x + j + Vec::kWidth), 1);
    }
    for (; j < n; j += Vec::kWidth)
        look(Vec::load(x + j, least(n - j, Vec::kWidth)), 0);
    const float top = max(highs[0], highs[1]).highest();
    const float bottom = (Vec::set(0) - min(lows[0], lows[1])).highest();
    return grid_between(bottom, top, odd.sum(), with_zero);
}

// Return the codes of x, as floats.
inline Vec code_of(Vec x, Vec times, Vec zero) {
    return max(min(round(x * times) + zero, Vec::set(255)), Vec::set(0));
}

// Round n numbers of a row to codes, or to the floats that the codes represent.
template <class T, class To>
inline void round_row(const T* x, int64_t n, const Grid& grid, To* to) {
    const Vec times = Vec::set(grid.times), zero = Vec::set(grid.zero), scale = Vec::set(grid.scale);
    const auto code = [&](Vec v) { return code_of(v, times, zero); };
    int64_t j = 0;
    if constexpr (std::is_same<To, uint8_t>::value) {
        for (; j + Vec::kWidth <= n; j += Vec::kWidth)
            store_low_bytes(code(Vec::load(x + j)), to + j);
        if (j < n) {
            uint8_t last[Vec::kWidth];
            store_low_bytes(code(Vec::load(x + j, n - j)), last);
            std::memcpy(to + j, last, static_cast<size_t>(n - j));
        }
    } else {
        for (; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            ((code(Vec::load(x + j, count)) - zero) * scale).store(to + j, count);
        }
    }
}

// Multiply each row, which consists of integers, by the scale of its grid.
inline void scale_rows(float* x, const Grid* grids, int64_t rows, int64_t columns, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
        const Vec scale = Vec::set(grids[r].scale);
        for (int64_t j = 0; j < columns; j += Vec::kWidth) {
            const int64_t n = least(columns - j, Vec::kWidth);
            (Vec::load(x + r * stride + j, n) * scale).store(x + r * stride + j, n);
        }
    }
}

} // namespace
} // namespace slipstream
