// AVX2 with FMA and F16C: eight floats at a time.
#define SLIPSTREAM_FLOATS_OF_BYTES 1
#include <immintrin.h>

#include "types.h"

namespace slipstream {
namespace {

struct Vec {
    static constexpr int kWidth = 8, kRows = 4, kCols = 2;
    static constexpr int kBlockRows = 4, kBlockGroups = 3;
    static constexpr bool kBf16Dot = false;
    __m256 v;

    static Vec set(float x) { return {_mm256_set1_ps(x)}; }
    static Vec repeat(const float* p) { return {_mm256_broadcast_ss(p)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const Bf16* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
    }
    static Vec load(const Half* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static Vec load(const int8_t* p) {
        const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw))};
    }
    // Widens 16 numbers: the result holds those of even index, and `odd` the others.
    static Vec load_pairs(const Bf16* p, Vec& odd) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        odd.v = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(-0x10000)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16))};
    }
    static Vec load_pairs(const Bf16* p, int64_t n, Vec& odd) {
        Bf16 whole[16] = {};
        std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(Bf16));
        return load_pairs(whole, odd);
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(Bf16* p) const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i high =
            _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
        const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    }
    void store(Half* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    template <class T>
    static Vec load(const T* p, int64_t n) {
        if (n == kWidth)
            return load(p);
        T whole[8];
        std::memset(whole, 0, sizeof(whole));
        std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
        return load(whole);
    }
    template <class T>
    void store(T* p, int64_t n) const {
        if (n == kWidth)
            return store(p);
        T whole[8];
        store(whole);
        std::memcpy(p, whole, static_cast<size_t>(n) * sizeof(T));
    }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    float highest() const {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }
};

template <int R, int C>
inline void store_sums(const Vec (&v)[R][C], float* out, int64_t os) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            out[r * os + c] = v[r][c].sum();
}

inline Vec operator+(Vec a, Vec b) {
    return {_mm256_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
    return {_mm256_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
    return {_mm256_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
    return {_mm256_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
    return {_mm256_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
    return {_mm256_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
    return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)};
}
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec round(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec power_of_two(Vec a) {
    const __m256i shifted = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(shifted, 23))};
}
inline Vec times_power_of_two(Vec p, Vec n) {
    return p * power_of_two(n);
}
// Return the bits of float16 magnitudes divided by 2^kShift, rounded to the nearest integer, ties to even, at
// most kMost.
template <int kShift, int kMost>
inline __m128i short_halves(__m128i size) {
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(size, kShift), _mm_set1_epi16(1));
    const __m128i sum = _mm_add_epi16(_mm_add_epi16(size, _mm_set1_epi16((1 << (kShift - 1)) - 1)), odd);
    return _mm_min_epu16(_mm_srli_epi16(sum, kShift), _mm_set1_epi16(kMost));
}
// See `Floats` in pack_numbers.h.
template <int kShift, int kMost>
inline Vec shortened(Vec size) {
    const __m128i code = short_halves<kShift, kMost>(_mm256_cvtps_ph(size.v, _MM_FROUND_TO_NEAREST_INT));
    return {_mm256_cvtph_ps(_mm_slli_epi16(code, kShift))};
}
template <int kShift, int kSign, int kMost>
inline void store_short(Vec v, uint8_t* codes) {
    const __m128i half = _mm256_cvtps_ph(v.v, _MM_FROUND_TO_NEAREST_INT);
    const __m128i size = short_halves<kShift, kMost>(_mm_and_si128(half, _mm_set1_epi16(0x7fff)));
    const __m128i code = _mm_or_si128(size, _mm_slli_epi16(_mm_srli_epi16(half, 15), kSign));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(code, code));
}
// Store the low bytes of integers of at most 15 bits plus sign.
inline void store_low_bytes(Vec x, uint8_t* p) {
    const __m256i whole = _mm256_and_si256(_mm256_cvtps_epi32(x.v), _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
// Store integers of at most 15 bits plus sign as words.
inline void store_words(Vec x, int16_t* p) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
}
// Transpose a square.
inline void transpose(Vec (&v)[8]) {
    __m256 quads[8];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i += 4) {
        const __m256 low = _mm256_unpacklo_ps(v[i].v, v[i + 1].v),
                     high = _mm256_unpackhi_ps(v[i].v, v[i + 1].v);
        const __m256 next_low = _mm256_unpacklo_ps(v[i + 2].v, v[i + 3].v);
        const __m256 next_high = _mm256_unpackhi_ps(v[i + 2].v, v[i + 3].v);
        quads[i] = _mm256_shuffle_ps(low, next_low, 0x44);
        quads[i + 1] = _mm256_shuffle_ps(low, next_low, 0xee);
        quads[i + 2] = _mm256_shuffle_ps(high, next_high, 0x44);
        quads[i + 3] = _mm256_shuffle_ps(high, next_high, 0xee);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        v[i].v = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20);
        v[4 + i].v = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31);
    }
}

// Load columns 0 to 3 of eight rows; the halves of two rows are joined while they are loaded.
inline void load_columns(const float* in, int64_t is, Vec (&v)[4]) {
    __m256 rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        rows[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(in + i * is)),
                                       _mm_loadu_ps(in + (i + 4) * is), 1);
    const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(rows[0], rows[1]));
    const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(rows[0], rows[1]));
    const __m256d next_low = _mm256_castps_pd(_mm256_unpacklo_ps(rows[2], rows[3]));
    const __m256d next_high = _mm256_castps_pd(_mm256_unpackhi_ps(rows[2], rows[3]));
    v[0].v = _mm256_castpd_ps(_mm256_unpacklo_pd(low, next_low));
    v[1].v = _mm256_castpd_ps(_mm256_unpackhi_pd(low, next_low));
    v[2].v = _mm256_castpd_ps(_mm256_unpacklo_pd(high, next_high));
    v[3].v = _mm256_castpd_ps(_mm256_unpackhi_pd(high, next_high));
}
} // namespace
} // namespace slipstream

#include "isa_avx2_floats.h"
#include "isa_avx2_fours.h"
#include "isa_avx2_words.h"
#include "table.h"

namespace slipstream {
constexpr Kernels kAvx2 =
    table(); // a compile-time constant: no code of this unit runs when the library is loaded
}
