// Exponential noise as torch's default CPU generator produces it: from a 32-bit Mersenne Twister, two words
// per number.
//
// Source: Matsumoto and Nishimura 1998 (MT19937); torch's ATen/core/MT19937RNGEngine.h for the layout of the
// state, TransformationHelper.h and DistributionsHelper.h for the conversion of 53 bits of two words to a
// number.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

// Apply the output transform (tempering) to a state word.
inline uint32_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// Continue the sequence: write `count` state words after the first kTwisted.
inline void twist(uint32_t* words, int64_t count) {
    constexpr int64_t kBefore = 397;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t y = (words[i] & 0x80000000u) | (words[i + 1] & 0x7fffffffu);
        words[i + kTwisted] = words[i + kBefore] ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
    }
}

// Noise that the caller provides.
struct GivenNoise {
    const float* noise;

    float exact(int64_t j) const { return noise[j]; }
    void lower(int64_t begin, int64_t n, float* to) const {
        std::memcpy(to, noise + begin, static_cast<size_t>(n) * sizeof(float));
    }
};

// Noise computed from words, -ln(1 - u). Few numbers are needed exactly: u, the lower bound, is cheap and
// never exceeds them.
struct WordNoise {
    const uint32_t* words;

    static constexpr uint32_t kUpper = (1u << 21) - 1; // the first word's bits; the second is the lower 32
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
