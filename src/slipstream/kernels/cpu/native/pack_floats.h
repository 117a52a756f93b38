// Packs groups of weights to 6-bit floats with the same operations in the same order as formats/fp6.py,
// search.py and minifloat.py, so that planes are bit-identical wherever a model is packed.
#pragma once

#include <limits>

namespace slipstream {
namespace {

constexpr int64_t kFloatGroup = 64;

// As many groups as a vector has lanes: x[j][l] is weight j of group l.
template <class To>
struct FloatGroups {
    alignas(64) float x[kFloatGroup][Vec::kWidth];
    alignas(64) uint8_t codes[kFloatGroup * Vec::kWidth];

    void encode(Vec scale) {
        const Vec times = inverse(scale) * Vec::set(To::kFactor);
        for (int64_t j = 0; j < kFloatGroup; ++j)
            To::encode(Vec::load(x[j]) * times, codes + j * Vec::kWidth);
    }
    // The sum of squared errors in the order of `tree`, eight at a time, so that they stay in registers.
    Vec error(Vec scale) {
        constexpr int64_t kPart = 8, kParts = kFloatGroup / kPart;
        const Vec times = inverse(scale) * Vec::set(To::kFactor), back = scale * Vec::set(1.0f / To::kFactor);
        Vec parts[kParts];
        for (int64_t i = 0; i < kParts; ++i)
            parts[i] = tree<kPart>([&](int64_t k) {
                const Vec size = abs(Vec::load(x[i + kParts * k]));
                const Vec off = To::nearest(size * times) * back - size;
                return off * off;
            });
        return tree<kParts>([&](int64_t i) { return parts[i]; });
    }
    // See formats/search.py: `fit_float`.
    Vec fit() {
        Vec largest = abs(Vec::load(x[0])), best = Vec::set(0.0f);
        for (int64_t j = 1; j < kFloatGroup; ++j)
            largest = max(abs(Vec::load(x[j])), largest);
        Vec least_error = Vec::set(std::numeric_limits<float>::infinity());
        for (const float target : To::kTarget) {
            const Vec scale = toward_zero(largest / Vec::set(target)), found = error(scale);
            best = if_less(found, least_error, scale, best);
            least_error = min(found, least_error);
        }
        return best;
    }
};

// Joins the codes of the first n lanes: the 64 codes of each lane to 32 bytes at `low` and 16 at `upper`.
inline void join_sixes(const uint8_t* codes, int64_t n, uint8_t* low, uint8_t* upper) {
    constexpr int64_t kLanes = Vec::kWidth, kRun = 16 * kLanes; // sixteen codes of all lanes
    uint8_t joined[3][kRun];
    for (int64_t j = 0; j < kRun; ++j) {
        const int a = codes[j], b = codes[j + kRun], c = codes[j + 2 * kRun], d = codes[j + 3 * kRun];
        joined[0][j] = static_cast<uint8_t>((a & 15) | (b & 15) << 4);
        joined[1][j] = static_cast<uint8_t>((c & 15) | (d & 15) << 4);
        joined[2][j] = static_cast<uint8_t>(a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6);
    }
    for (int64_t l = 0; l < n; ++l)
        for (int64_t j = 0; j < 16; ++j) {
            low[32 * l + j] = joined[0][j * kLanes + l];
            low[32 * l + 16 + j] = joined[1][j * kLanes + l];
            upper[16 * l + j] = joined[2][j * kLanes + l];
        }
}

// Packs several rows; `x` has room for them with padding.
template <class To>
inline void pack_floats(const PackCall& call, int64_t first, int64_t count, float* x) {
    const Matrix& m = call.packed;
    const int64_t groups = ceil_div(m.inputs, kFloatGroup), padded = groups * kFloatGroup;
    read_padded(call, first, count, padded, x);
    auto* low = static_cast<uint8_t*>(const_cast<void*>(m.planes[kCodes])) + first * padded / 2;
    auto* upper = static_cast<uint8_t*>(const_cast<void*>(m.planes[kUpper])) + first * padded / 4;
    auto* scales = static_cast<Half*>(const_cast<void*>(m.planes[kScales])) + first * groups;
    FloatGroups<To> g;
    for (int64_t b = 0; b < count * groups; b += Vec::kWidth) {
        const int64_t n = least(Vec::kWidth, count * groups - b);
        side_by_side(x + b * kFloatGroup, kFloatGroup, n, g.x);
        const Vec scale = g.fit();
        g.encode(scale);
        scale.store(scales + b, n);
        join_sixes(g.codes, n, low + b * 32, upper + b * 16);
    }
}

} // namespace
} // namespace slipstream
