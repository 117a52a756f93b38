// Exponential noise as torch's default generator of CPUs makes it: a Mersenne twister of 32 bits, two words
// of it for each number.
//
// Source: Matsumoto and Nishimura 1998 (MT19937); torch's ATen/core/MT19937RNGEngine.h for where its state
// stands, TransformationHelper.h and DistributionsHelper.h for how 53 bits of two words become a number.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

// A word of the sequence as it is given away.
inline uint32_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// Continues the sequence: writes `count` words behind the first kTwisted.
inline void twist(uint32_t* words, int64_t count) {
    constexpr int64_t kBefore = 397;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t y = (words[i] & 0x80000000u) | (words[i + 1] & 0x7fffffffu);
        words[i + kTwisted] = words[i + kBefore] ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
    }
}

// Noise that was made before.
struct GivenNoise {
    const float* noise;

    float exact(int64_t j) const { return noise[j]; }
    void lower(int64_t begin, int64_t n, float* to) const {
        std::memcpy(to, noise + begin, static_cast<size_t>(n) * sizeof(float));
    }
};

// Noise of words, -ln(1 - u), of which few numbers are ever needed exactly: u is never above it.
struct WordNoise {
    const uint32_t* words;

    static constexpr uint32_t kUpper = (1u << 21) - 1; // of the first word; the second is the lower 32 bits
    float exact(int64_t j) const {
        const uint64_t bits = static_cast<uint64_t>(tempered(words[2 * j]) & kUpper) << 32;
        const auto u = static_cast<double>(bits | tempered(words[2 * j + 1])) * 0x1p-53;
        return static_cast<float>(-std::log1p(-u));
    }
    void lower(int64_t begin, int64_t n, float* to) const {
        for (int64_t j = 0; j < n; ++j)
            to[j] = static_cast<float>(static_cast<int32_t>(tempered(words[2 * (begin + j)]) & kUpper));
        for (int64_t j = 0; j < n; ++j)
            to[j] *= 0x1p-21f;
    }
};

} // namespace
} // namespace slipstream
