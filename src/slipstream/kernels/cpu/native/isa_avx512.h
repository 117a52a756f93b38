// AVX-512 (F, BW, DQ, VL): sixteen floats at a time; with SLIPSTREAM_BF16_DOT also products of pairs of
// bfloat16 and of fours of bytes.
#pragma once

#define SLIPSTREAM_AVX512 1

#ifdef SLIPSTREAM_EMULATE_AVX512
#include "soft_avx512.h"
#else
#include <immintrin.h>
#endif

#include "types.h"

namespace slipstream {
namespace {

struct Vec {
    static constexpr int kWidth = 16, kRows = 4, kCols = 4;
    static constexpr int kBlockRows = 8, kBlockGroups = 3;
#ifdef SLIPSTREAM_BF16_DOT
    static constexpr bool kBf16Dot = true;
#else
    static constexpr bool kBf16Dot = false;
#endif
    __m512 v;

    static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    static Vec widen(__m256i raw, const Bf16*) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
    }
    static Vec widen(__m256i raw, const Half*) { return {_mm512_cvtph_ps(raw)}; }
    __m256i narrow(const Bf16*) const {
#ifdef SLIPSTREAM_BF16_DOT
        return (__m256i)_mm512_cvtneps_pbh(v);
#else
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(
            _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0)));
#endif
    }
    __m256i narrow(const Half*) const {
        return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }

    static Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec repeat(const float* p) { return {_mm512_set1_ps(*p)}; } // bits are kept, whatever they mean
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
    template <class T>
    static Vec load(const T* p) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
    }
    template <class T>
    static Vec load(const T* p, int64_t n) {
        return widen(_mm256_maskz_loadu_epi16(first(n), p), p);
    }
    // Widens 32 numbers: the result holds those of even index, and `odd` the others.
    static Vec widen_pairs(__m512i raw, Vec& odd) {
        odd.v = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(-0x10000)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))};
    }
    static Vec load_pairs(const Bf16* p, Vec& odd) { return widen_pairs(_mm512_loadu_si512(p), odd); }
    static Vec load_pairs(const Bf16* p, int64_t n, Vec& odd) {
        return widen_pairs(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p), odd);
    }
    static Vec load(const int8_t* p) {
        return {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    static Vec load(const int8_t* p, int64_t n) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, first(n), v); }
    template <class T>
    void store(T* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(p));
    }
    template <class T>
    void store(T* p, int64_t n) const {
        _mm256_mask_storeu_epi16(p, first(n), narrow(p));
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float highest() const { return _mm512_reduce_max_ps(v); }
};

// Add adjacent quarters (128-bit lanes): [a0 + a1, a2 + a3, b0 + b1, b2 + b3].
inline __m512 fold(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Return the sum of v[i / C][i % C] in lane i, for sixteen vectors, which are reduced together in a third of
// the instructions.
template <int R, int C>
[[gnu::always_inline]] inline __m512 sixteen_sums(const Vec (&v)[R][C]) {
    static_assert(R * C == 16, "a lane for each");
    const auto at = [&](int r, int c) { return v[(4 * r + c) / C][(4 * r + c) % C].v; };
    __m512 quarter[4]; // by column of a 4 x 4 arrangement; quarter r holds the partial sums of row r
#pragma GCC unroll 16
    for (int c = 0; c < 4; ++c)
        quarter[c] = fold(fold(at(0, c), at(1, c)), fold(at(2, c), at(3, c)));
    const __m512 low =
        _mm512_add_ps(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
    const __m512 high =
        _mm512_add_ps(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
    const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// out[r * os + c] = sum of the lanes of v[r][c].
template <int R, int C>
[[gnu::always_inline]] inline void store_sums(const Vec (&v)[R][C], float* out, int64_t os) {
    if constexpr (R == 8 && C == 2) {
        alignas(64) float sums[16];
        _mm512_store_ps(sums, sixteen_sums(v));
#pragma GCC unroll 16
        for (int r = 0; r < 8; ++r)
            std::memcpy(out + r * os, sums + 2 * r, 2 * sizeof(float));
    } else if constexpr (R > 4 && C == 2) {
        Vec all[8][2]; // rows are repeated to fill the eight
        for (int r = 0; r < 8; ++r)
            for (int c = 0; c < 2; ++c)
                all[r][c] = v[r % R][c];
        alignas(64) float sums[16];
        _mm512_store_ps(sums, sixteen_sums(all));
        for (int r = 0; r < R; ++r)
            std::memcpy(out + r * os, sums + 2 * r, 2 * sizeof(float));
    } else if constexpr (R == 4 && C == 4) {
        const __m512 sums = sixteen_sums(v);
        _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
        _mm_storeu_ps(out + os, _mm512_extractf32x4_ps(sums, 1));
        _mm_storeu_ps(out + 2 * os, _mm512_extractf32x4_ps(sums, 2));
        _mm_storeu_ps(out + 3 * os, _mm512_extractf32x4_ps(sums, 3));
    } else if constexpr (C == 4) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            __m512 s = fold(fold(v[r][0].v, v[r][1].v), fold(v[r][2].v, v[r][3].v)); // a quarter each
            s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
            s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
            const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
            _mm_storeu_ps(out + r * os, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
        }
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                out[r * os + c] = v[r][c].sum();
    }
}

inline Vec operator+(Vec a, Vec b) {
    return {_mm512_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
    return {_mm512_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
    return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
    return {_mm512_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
    return {_mm512_abs_ps(a.v)};
}
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec round(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec power_of_two(Vec a) {
    const __m512i shifted = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(shifted, 23))};
}

// Return 1 / x, accurate to 14 bits.
inline Vec near_reciprocal(Vec x) {
    return {_mm512_rcp14_ps(x.v)};
}

// Return p * 2^n.
inline Vec times_power_of_two(Vec p, Vec n) {
    return {_mm512_scalef_ps(p.v, n.v)};
}
// Return the bits of float16 magnitudes divided by 2^kShift, rounded to the nearest integer, ties to even, at
// most kMost.
template <int kShift, int kMost>
inline __m256i short_halves(__m256i size) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(size, kShift), _mm256_set1_epi16(1));
    const __m256i half = _mm256_set1_epi16((1 << (kShift - 1)) - 1);
    const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(size, half), odd);
    return _mm256_min_epu16(_mm256_srli_epi16(sum, kShift), _mm256_set1_epi16(kMost));
}
// See `Floats` in pack_numbers.h.
template <int kShift, int kMost>
inline Vec shortened(Vec size) {
    const __m256i code = short_halves<kShift, kMost>(size.narrow(static_cast<const Half*>(nullptr)));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(code, kShift))};
}
template <int kShift, int kSign, int kMost>
inline void store_short(Vec v, uint8_t* codes) {
    const __m256i half = v.narrow(static_cast<const Half*>(nullptr));
    const __m256i size = short_halves<kShift, kMost>(_mm256_and_si256(half, _mm256_set1_epi16(0x7fff)));
    const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(half, 15), kSign);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_cvtepi16_epi8(_mm256_or_si256(size, sign)));
}
// Store the low bytes of integers.
inline void store_low_bytes(Vec x, uint8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// Store integers of at most 15 bits plus sign as words.
inline void store_words(Vec x, int16_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
#ifdef SLIPSTREAM_BF16_DOT
// Repeat four or eight bytes over all lanes; if fewer bytes are given, the rest of each repetition is zero.
template <int N>
inline __m512i spread_bytes(const void* p, int64_t bytes = N) {
    typename std::conditional<N == 4, int32_t, int64_t>::type all = 0;
    static_assert(sizeof(all) == N, "others have instructions of their own");
    std::memcpy(&all, p, static_cast<size_t>(bytes));
    if constexpr (N == 4)
        return _mm512_set1_epi32(all);
    else
        return _mm512_set1_epi64(all);
}
// 32 numbers in bfloat16; `dot` sums the products of pairs in float32.
struct Bf16Lanes {
    __m512i v;
    static Bf16Lanes load(const Bf16* p) { return {_mm512_loadu_si512(p)}; }
    static Bf16Lanes load(const Bf16* p, int64_t n) {
        return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)};
    }
    // The W pairs at `p`, repeated over all lanes; the last of a row may have only n numbers.
    template <int W>
    static Bf16Lanes spread(const Bf16* p, int64_t n = 2 * W) {
        return {spread_bytes<4 * W>(p, 2 * n)};
    }
    static Bf16Lanes pair(Vec even, Vec odd) {
        const Bf16* type = nullptr;
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd.narrow(type)), 16);
        return {_mm512_or_si512(_mm512_cvtepu16_epi32(even.narrow(type)), high)};
    }
    void store(Bf16* p) const { _mm512_storeu_si512(p, v); }
};
inline Vec dot(Vec sum, Bf16Lanes a, Bf16Lanes b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
// Add lanes 2i and 2i + 1 of a and of b; the order of the sums is 0 and 1 of a, 0 and 1 of b, 2 and 3 of a,
// and so on.
inline Vec fold(Vec a, Vec b) {
    return {_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xdd))};
}
// `dot` for operands whose 32-bit lanes hold a pair of bfloat16 each.
inline Vec dot_pairs(Vec sum, Vec a, Vec b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
}
// Pairs (p[0], p[1]), (p[2], p[3]), ... of n <= 32 elements, followed by zeros.
inline Vec pairs_along(const Bf16* p, int64_t n) {
    return {_mm512_castsi512_ps(Bf16Lanes::load(p, n).v)};
}
template <class T>
inline Vec pairs_along(const T* p, int64_t n) {
    const Vec low = Vec::load(p, least(n, 16)), high = n > 16 ? Vec::load(p + 16, n - 16) : Vec::set(0);
    return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high.v, low.v))};
}
inline __m512i bf16_bits(const Bf16* p, int64_t n) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(Vec::first(n), p));
}
template <class T>
inline __m512i bf16_bits(const T* p, int64_t n) {
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(Vec::load(p, n).v));
}
// Codes are exact in bfloat16, which is the upper half of their float.
inline Vec pairs_across(const int8_t* p, const int8_t* q, int64_t n) {
    __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(Vec::load(p, n).v), 16);
    if (q) {
        const __m512i upper = _mm512_castps_si512(Vec::load(q, n).v);
        bits = _mm512_or_si512(bits, _mm512_and_si512(upper, _mm512_set1_epi32(-65536)));
    }
    return {_mm512_castsi512_ps(bits)};
}
// Pairs (p[0], q[0]), (p[1], q[1]), ... of n <= 16 elements each; if q is null, its elements are zeros.
template <class T>
inline Vec pairs_across(const T* p, const T* q, int64_t n) {
    __m512i bits = bf16_bits(p, n);
    if (q)
        bits = _mm512_or_si512(bits, _mm512_slli_epi32(bf16_bits(q, n), 16));
    return {_mm512_castsi512_ps(bits)};
}
// C vectors of pairs (p[j], q[j]) of consecutive elements.
template <class T, int C>
inline void pairs_across(const T* p, const T* q, Vec (&v)[C]) {
    for (int c = 0; c < C; ++c)
        v[c] = pairs_across(p + 16 * c, q + 16 * c, 16);
}
template <int C>
inline void pairs_across(const Bf16* p, const Bf16* q, Vec (&v)[C]) {
    static_assert(C % 2 == 0, "two vectors for each that is loaded");
    alignas(64) static constexpr uint16_t kBoth[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                       37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                       11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(kBoth), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (int c = 0; c < C; c += 2) {
        const __m512i a = _mm512_loadu_si512(p + 16 * c), b = _mm512_loadu_si512(q + 16 * c);
        v[c].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, first, b));
        v[c + 1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, second, b));
    }
}
#endif

} // namespace
} // namespace slipstream

#include "isa_avx512_transpose.h"
#ifndef SLIPSTREAM_BF16_DOT
#include "isa_avx2_words.h"
#endif
#include "table.h"
