// Packs groups of weights to 4-bit integers with the same operations in the same order as formats/int4.py and
// formats/search.py, so that planes are bit-identical wherever a model is packed.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

inline Vec inverse(Vec scale) {
    const Vec zero = Vec::set(0.0f), one = Vec::set(1.0f);
    const Vec safe = if_less(zero, abs(scale), scale, one);
    return if_less(zero, abs(scale), one / safe, zero);
}

// Rounds to the nearest float16.
inline Vec to_half(Vec x) {
    alignas(64) Half halves[Vec::kWidth];
    x.store(halves);
    return Vec::load(halves);
}

// Rounds to the nearest float16 that is not larger in magnitude.
inline Vec toward_zero(Vec x) {
    alignas(64) Half halves[Vec::kWidth];
    alignas(64) float above[Vec::kWidth];
    x.store(halves);
    if_less(abs(x), abs(Vec::load(halves)), Vec::set(1.0f), Vec::set(0.0f)).store(above);
    for (int i = 0; i < Vec::kWidth; ++i)
        halves[i].bits = static_cast<uint16_t>(halves[i].bits - static_cast<uint16_t>(above[i]));
    return Vec::load(halves);
}

// The sum of f(0) ... f(kSize - 1), adding halves pairwise.
template <int64_t kSize, class F>
inline Vec tree(F f) {
    Vec t[kSize / 2];
    for (int64_t j = 0; j < kSize / 2; ++j)
        t[j] = f(j) + f(j + kSize / 2);
    for (int64_t half = kSize / 4; half > 1; half /= 2)
        for (int64_t j = 0; j < half; ++j)
            t[j] = t[j] + t[j + half];
    return t[0] + t[1];
}

// As many groups as a vector has lanes: x[j] holds weight j of each group.
template <int64_t kSize>
struct Groups {
    static constexpr int64_t size = kSize;
    Vec x[kSize], codes[kSize];
    Vec low, high;

    void fill(const float (*lanes)[Vec::kWidth]) {
        for (int64_t j = 0; j < size; ++j)
            x[j] = Vec::load(lanes[j]);
    }
    void range() {
        low = high = x[0];
        for (int64_t j = 1; j < size; ++j) {
            low = min(x[j], low);
            high = max(x[j], high);
        }
    }
    // codes = (x - offset) / scale, rounded and clamped.
    void encode(Vec scale, Vec offset, float least_code, float most_code) {
        const Vec factor = inverse(scale), a = Vec::set(least_code), b = Vec::set(most_code);
        for (int64_t j = 0; j < size; ++j)
            codes[j] = min(max(round((x[j] - offset) * factor), a), b);
    }
    Vec sum() {
        return tree<size>([&](int64_t j) { return x[j]; });
    }
    Vec squares() {
        return tree<size>([&](int64_t j) { return x[j] * x[j]; });
    }
    Vec sum_q() {
        return tree<size>([&](int64_t j) { return codes[j]; });
    }
    Vec sum_qq() {
        return tree<size>([&](int64_t j) { return codes[j] * codes[j]; });
    }
    Vec sum_qx() {
        return tree<size>([&](int64_t j) { return codes[j] * x[j]; });
    }
    Vec error(Vec scale) {
        return tree<size>([&](int64_t j) {
            const Vec off = codes[j] * scale - x[j];
            return off * off;
        });
    }
};

constexpr float kEdge = 0.499f, kNoise = 4e-6f, kOneNumber = 1.0f / 32;

struct Range {
    Vec scale, minimum, error;
};

// See formats/search.py: `_better`. `g.x` is relative to `start`.
template <class G>
inline void improve(Range& best, G& g, Vec start, Vec low, Vec high, Vec sum_y, Vec sum_yy) {
    const Vec n = Vec::set(static_cast<float>(g.size)), two = Vec::set(2.0f), levels = Vec::set(15.0f);
    const Vec zero = Vec::set(0.0f), edge = Vec::set(kEdge);
    const Vec q = g.sum_q(), qq = g.sum_qq(), qy = g.sum_qx();
    const Vec slope = (n * qy - q * sum_y) * inverse(n * qq - q * q);
    const Vec minimum = to_half(start + (sum_y - slope * q) / n), offset = minimum - start;
    const Vec scale = to_half((qy - offset * q) * inverse(qq));
    const Vec error =
        sum_yy + scale * (scale * qq - two * qy) + offset * (n * offset - two * sum_y + two * scale * q);
    Vec fits = Vec::set(1.0f);
    fits = if_less(scale * edge, abs(low - offset), zero, fits);
    fits = if_less(scale * edge, abs(high - offset - levels * scale), zero, fits);
    fits = if_less(levels * scale, abs(minimum) * Vec::set(kOneNumber), zero, fits);
    fits = if_less(error, best.error - Vec::set(kNoise) * sum_yy, fits, zero);
    best.scale = if_less(zero, fits, scale, best.scale);
    best.minimum = if_less(zero, fits, minimum, best.minimum);
    best.error = if_less(zero, fits, error, best.error);
}

// See formats/search.py: `fit_range`. Leaves the codes in `g`.
template <class G>
inline Range fit_range(G& g) {
    const Vec zero = Vec::set(0.0f), levels = Vec::set(15.0f);
    g.range();
    const Vec start = to_half(g.low), first = toward_zero((g.high - start) / levels);
    const Vec low = g.low - start, high = g.high - start, wide = (g.high - g.low) / Vec::set(15.9f);
    for (int64_t j = 0; j < g.size; ++j)
        g.x[j] = g.x[j] - start;
    const Vec sum_y = g.sum(), sum_yy = g.squares();
    g.encode(first, zero, 0, 15);
    Range best = {first, start, g.error(first)};
    improve(best, g, start, low, high, sum_y, sum_yy);
    g.encode(wide, low + wide * Vec::set(0.45f), 0, 15);
    improve(best, g, start, low, high, sum_y, sum_yy);
    g.encode(best.scale, best.minimum - start, 0, 15);
    improve(best, g, start, low, high, sum_y, sum_yy);
    const Vec bound = abs(start) * Vec::set(kOneNumber), spread = levels * first;
    best.scale = if_less(spread, bound, zero, best.scale);
    best.minimum = if_less(spread, bound, to_half(start + (low + high) / Vec::set(2.0f)), best.minimum);
    return best;
}

// See formats/search.py: `fit_signed`.
template <class G>
inline Vec fit_signed(G& g) {
    const Vec zero = Vec::set(0.0f), one = Vec::set(1.0f), edge = Vec::set(kEdge), seven = Vec::set(7.0f);
    g.range();
    const Vec below = zero - g.low, eight = Vec::set(8.0f);
    const Vec peak = if_less(below, g.high, g.high, g.low), other = if_less(below, g.high, g.low, g.high);
    const Vec xx = g.squares();
    const Vec starts[2] = {toward_zero(peak / Vec::set(-8.0f)), toward_zero(abs(peak) / seven)};
    g.encode(starts[0], zero, -8, 7);
    Vec error = g.error(starts[0]);
    g.encode(starts[1], zero, -8, 7);
    const Vec rival = g.error(starts[1]);
    Vec scale = if_less(rival, error, starts[1], starts[0]);
    error = min(rival, error);
    for (int i = 0; i < 3; ++i) {
        g.encode(i < 2 ? starts[i] : scale, zero, -8, 7);
        const Vec qq = g.sum_qq(), qx = g.sum_qx();
        const Vec fit = to_half(qx * inverse(qq));
        const Vec found = xx + fit * (fit * qq - Vec::set(2.0f) * qx);
        const Vec place = peak * inverse(fit);
        Vec fits = if_less(edge, abs(abs(place) - seven), zero, if_less(zero, fit, one, zero));
        fits = if_less(edge, abs(place + eight), fits, one);
        fits = if_less(eight, other * inverse(fit), zero, fits);
        fits = if_less(found, error - Vec::set(kNoise) * xx, fits, zero);
        scale = if_less(zero, fits, fit, scale);
        error = if_less(zero, fits, found, error);
    }
    return scale;
}

// The power of 2^24 that, divided out, brings a row's largest magnitude to [2^-10, 2^14).
inline float row_multiplier(float largest) {
    if (largest == 0.0f)
        return 1.0f;
    int exponent;
    std::frexp(largest, &exponent);
    const int steps = static_cast<int>(std::floor(static_cast<double>(exponent + 9) / 24.0));
    return std::ldexp(1.0f, 24 * (steps < -5 ? -5 : (steps > 5 ? 5 : steps)));
}

// Reads several rows, divides out their multipliers, and pads them: for int4 by repeating the last number,
// which does not widen a group's range, for other formats by zeros.
inline void read_padded(const PackCall& call, int64_t first, int64_t count, int64_t padded, float* x) {
    const Matrix& m = call.packed;
    auto* factors = static_cast<float*>(const_cast<void*>(m.planes[kFactors]));
    const bool repeats = m.format == kInt4 || m.format == kInt4Symmetric;
    for (int64_t r = 0; r < count; ++r) {
        float* row = x + r * padded;
        const float multiplier = row_multiplier(read_row(call, first + r, row)), back = 1.0f / multiplier;
        factors[first + r] = multiplier;
        for (int64_t j = 0; multiplier != 1.0f && j < m.inputs; ++j)
            row[j] *= back;
        for (int64_t j = m.inputs; j < padded; ++j)
            row[j] = repeats ? row[m.inputs - 1] : 0.0f;
    }
}

// Interleaves `n` consecutive groups of `size` weights: lanes[j] holds weight j of each group; surplus lanes
// repeat the last group.
inline void side_by_side(const float* x, int64_t size, int64_t n, float (*lanes)[Vec::kWidth]) {
    if (n == Vec::kWidth) {
        for (int64_t j = 0; j < size; j += Vec::kWidth)
            transpose(x + j, size, lanes[j], Vec::kWidth);
        return;
    }
    for (int64_t l = 0; l < Vec::kWidth; ++l)
        for (int64_t j = 0; j < size; ++j)
            lanes[j][l] = x[least(l, n - 1) * size + j];
}

// Joins 32 codes of each of n lanes to 16 bytes, those of lane l at `to + l * stride`: code j in the lower
// half of byte j, code j + 16 in the upper half.
inline void join_nibbles(const Vec* codes, int64_t n, uint8_t* to, int64_t stride) {
    constexpr int64_t kPairs = 16;
    alignas(64) float joined[kPairs][Vec::kWidth], turned[Vec::kWidth][kPairs];
    for (int64_t j = 0; j < kPairs; ++j)
        fma(codes[j + kPairs], Vec::set(16.0f), codes[j]).store(joined[j]);
    for (int64_t j = 0; j < kPairs; j += Vec::kWidth)
        transpose(joined[j], Vec::kWidth, turned[0] + j, kPairs);
    for (int64_t l = 0; l < n; ++l)
        for (int64_t j = 0; j < kPairs; ++j)
            to[l * stride + j] = static_cast<uint8_t>(static_cast<int>(turned[l][j]));
}

// Packs several rows of int4 in groups of kSize; `x` has room for them with padding.
template <int64_t kSize>
inline void pack_groups_of(const PackCall& call, int64_t first, int64_t count, float* x) {
    const Matrix& m = call.packed;
    const int64_t groups = ceil_div(m.inputs, m.group), padded = groups * m.group;
    const bool ranged = m.format == kInt4;
    read_padded(call, first, count, padded, x);
    auto* codes = static_cast<uint8_t*>(const_cast<void*>(m.planes[kCodes])) + first * padded / 2;
    auto* scales = static_cast<Half*>(const_cast<void*>(m.planes[kScales])) + first * groups;
    auto* minima = static_cast<Half*>(const_cast<void*>(m.planes[kMinima])) + (ranged ? first * groups : 0);
    Groups<kSize> g;
    alignas(64) float lanes[kSize][Vec::kWidth];
    for (int64_t b = 0; b < count * groups; b += Vec::kWidth) {
        const int64_t n = least(Vec::kWidth, count * groups - b);
        side_by_side(x + b * g.size, g.size, n, lanes);
        g.fill(lanes);
        const Range found = ranged ? fit_range(g) : Range{fit_signed(g), Vec::set(0.0f), Vec::set(0.0f)};
        g.fill(lanes);
        g.encode(found.scale, found.minimum, ranged ? 0 : -8, ranged ? 15 : 7);
        for (int64_t j = 0; !ranged && j < g.size; ++j)
            g.codes[j] = g.codes[j] + Vec::set(8.0f);
        found.scale.store(scales + b, n);
        if (ranged)
            found.minimum.store(minima + b, n);
        for (int64_t k = 0; k < g.size; k += 32)
            join_nibbles(g.codes + k, n, codes + (b * g.size + k) / 2, g.size / 2);
    }
}

inline void pack_groups(const PackCall& call, int64_t first, int64_t count, float* x) {
    if (call.packed.group == 32)
        pack_groups_of<32>(call, first, count, x);
    else if (call.packed.group == 64)
        pack_groups_of<64>(call, first, count, x);
    else
        pack_groups_of<128>(call, first, count, x);
}

} // namespace
} // namespace slipstream
