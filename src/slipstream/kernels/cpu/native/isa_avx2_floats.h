// Conversion of fp8 codes to floats in registers.
#pragma once

namespace slipstream {
namespace {

constexpr float kFp8Unit = 256; // factor for the results of each_fp8

// Call take(at, numbers at to at + 8) for 64 fp8 codes, converted by way of float16, which has one more
// exponent bit.
template <class F>
[[gnu::always_inline]] inline void each_fp8(const uint8_t* codes, F take) {
    const __m256i zero = _mm256_setzero_si256(), fields = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
#pragma GCC unroll 2
    for (int at = 0; at < 64; at += 32) {
        const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at));
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) { // eight codes of each 16-byte lane
            const __m256i high = i ? _mm256_unpackhi_epi8(zero, some) : _mm256_unpacklo_epi8(zero, some);
            const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(high, 1), fields);
            take(at + 8 * i, Vec{_mm256_cvtph_ps(_mm256_castsi256_si128(halves))});
            take(at + 8 * i + 16, Vec{_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))});
        }
    }
}

} // namespace
} // namespace slipstream
