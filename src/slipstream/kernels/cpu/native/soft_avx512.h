// Emulates what the AVX-512 and AMX code uses of AVX-512 and its extensions, on a processor that only has
// AVX2: for tests on machines without these instructions. Names in this namespace hide those of the
// compiler's header.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Without optimisation the compiler's header defines these as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x4_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_insertf32x4
#undef _mm512_inserti64x4
#undef _mm512_permute_ps
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i64x2
#undef _mm512_shuffle_ps
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_ternarylogic_epi32

namespace slipstream {
namespace {

using SoftShorts = uint16_t __attribute__((vector_size(64)));
using SoftWords = uint32_t __attribute__((vector_size(64)));
using SoftSigned = int32_t __attribute__((vector_size(64)));
using SoftLongs = uint64_t __attribute__((vector_size(64)));

// The items of a register as an array.
template <class T, class V>
struct SoftItems {
    static constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(T));
    T at[kCount] = {};
    SoftItems() = default;
    explicit SoftItems(V v) { std::memcpy(at, &v, sizeof(V)); }
    V whole() const {
        V v;
        std::memcpy(&v, at, sizeof(V));
        return v;
    }
};
template <class T>
using SoftInts = SoftItems<T, __m512i>;
using SoftFloats = SoftItems<float, __m512>;

// Splits a register into its two halves, and joins them again.
template <class Half, class V>
Half half(V v, int which) {
    Half h;
    std::memcpy(&h, reinterpret_cast<const char*>(&v) + which * sizeof(Half), sizeof(Half));
    return h;
}
template <class V, class Half>
V whole(Half first, Half second) {
    V v;
    std::memcpy(&v, &first, sizeof(Half));
    std::memcpy(reinterpret_cast<char*>(&v) + sizeof(Half), &second, sizeof(Half));
    return v;
}
inline __m256i low(__m512i a) {
    return half<__m256i>(a, 0);
}
inline __m256i high(__m512i a) {
    return half<__m256i>(a, 1);
}
inline __m256 low(__m512 a) {
    return half<__m256>(a, 0);
}
inline __m256 high(__m512 a) {
    return half<__m256>(a, 1);
}
inline __m128i low(__m256i a) {
    return _mm256_castsi256_si128(a);
}
inline __m128i high(__m256i a) {
    return _mm256_extracti128_si256(a, 1);
}
// Only the lower half is read.
inline __m128i low(__m128i a) {
    return a;
}
inline __m128i high(__m128i a) {
    return _mm_srli_si128(a, 8);
}

// Applies an AVX2 instruction to each half of the operands.
#define SLIPSTREAM_BY_HALVES_1(name, V, A)                                                                   \
    inline V _mm512_##name(A a) {                                                                            \
        return whole<V>(_mm256_##name(low(a)), _mm256_##name(high(a)));                                      \
    }
#define SLIPSTREAM_BY_HALVES_2(name, V)                                                                      \
    inline V _mm512_##name(V a, V b) {                                                                       \
        return whole<V>(_mm256_##name(low(a), low(b)), _mm256_##name(high(a), high(b)));                     \
    }
#define SLIPSTREAM_SHIFTS(name)                                                                              \
    inline __m512i _mm512_##name(__m512i a, int n) {                                                         \
        return whole<__m512i>(_mm256_##name(low(a), n), _mm256_##name(high(a), n));                          \
    }
SLIPSTREAM_BY_HALVES_1(abs_epi8, __m512i, __m512i)
SLIPSTREAM_BY_HALVES_1(cvtepi32_ps, __m512, __m512i)
SLIPSTREAM_BY_HALVES_1(cvtepi8_epi32, __m512i, __m128i)
SLIPSTREAM_BY_HALVES_1(cvtepu16_epi32, __m512i, __m256i)
SLIPSTREAM_BY_HALVES_1(cvtepu8_epi16, __m512i, __m256i)
SLIPSTREAM_BY_HALVES_1(cvtepu8_epi32, __m512i, __m128i)
SLIPSTREAM_BY_HALVES_1(cvtph_ps, __m512, __m256i)
SLIPSTREAM_BY_HALVES_1(cvtps_epi32, __m512i, __m512)
SLIPSTREAM_BY_HALVES_2(madd_epi16, __m512i)
SLIPSTREAM_BY_HALVES_2(max_ps, __m512)
SLIPSTREAM_BY_HALVES_2(min_ps, __m512)
SLIPSTREAM_BY_HALVES_2(shuffle_epi8, __m512i)
SLIPSTREAM_BY_HALVES_2(srlv_epi64, __m512i)
SLIPSTREAM_BY_HALVES_2(unpackhi_epi32, __m512i)
SLIPSTREAM_BY_HALVES_2(unpackhi_epi64, __m512i)
SLIPSTREAM_BY_HALVES_2(unpackhi_epi8, __m512i)
SLIPSTREAM_BY_HALVES_2(unpackhi_ps, __m512)
SLIPSTREAM_BY_HALVES_2(unpacklo_epi32, __m512i)
SLIPSTREAM_BY_HALVES_2(unpacklo_epi64, __m512i)
SLIPSTREAM_BY_HALVES_2(unpacklo_epi8, __m512i)
SLIPSTREAM_BY_HALVES_2(unpacklo_ps, __m512)
SLIPSTREAM_SHIFTS(slli_epi16)
SLIPSTREAM_SHIFTS(slli_epi32)
SLIPSTREAM_SHIFTS(srai_epi32)
SLIPSTREAM_SHIFTS(srli_epi16)
SLIPSTREAM_SHIFTS(srli_epi32)
#undef SLIPSTREAM_BY_HALVES_1
#undef SLIPSTREAM_BY_HALVES_2
#undef SLIPSTREAM_SHIFTS

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return whole<__m512>(_mm256_fmadd_ps(low(a), low(b), low(c)), _mm256_fmadd_ps(high(a), high(b), high(c)));
}
inline __m512i _mm512_srl_epi32(__m512i a, __m128i n) {
    return whole<__m512i>(_mm256_srl_epi32(low(a), n), _mm256_srl_epi32(high(a), n));
}
inline __m256i _mm512_cvtps_ph(__m512 a, int) {
    return _mm256_set_m128i(_mm256_cvtps_ph(high(a), 0), _mm256_cvtps_ph(low(a), 0));
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC; // the only mode used
    return whole<__m512>(_mm256_round_ps(low(a), kNearest), _mm256_round_ps(high(a), kNearest));
}

inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
    return a + b;
}
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) {
    return a - b;
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    return a * b;
}
inline __m512 _mm512_div_ps(__m512 a, __m512 b) {
    return a / b;
}
inline __m512 _mm512_abs_ps(__m512 a) {
    return (__m512)((SoftWords)a & 0x7fffffff);
}
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
    return (__m512i)((SoftShorts)a + (SoftShorts)b);
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return (__m512i)((SoftWords)a + (SoftWords)b);
}
inline __m512i _mm512_add_epi64(__m512i a, __m512i b) {
    return (__m512i)((SoftLongs)a + (SoftLongs)b);
}
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
    return (__m512i)((SoftWords)a - (SoftWords)b);
}
inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
    return (__m512i)((SoftWords)a * (SoftWords)b);
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
    return a & b;
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
    return a | b;
}
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) {
    return a ^ b;
}
inline __m512i _mm512_rolv_epi64(__m512i a, __m512i n) {
    const SoftLongs left = (SoftLongs)n & 63, right = (64 - left) & 63;
    return (__m512i)((SoftLongs)a << left | (SoftLongs)a >> right);
}
// Each result bit is bit 4 a + 2 b + c of the table.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    __m512i all = a ^ a;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1)
            all |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return all;
}

inline __m512d _mm512_castps_pd(__m512 a) {
    return (__m512d)a;
}
inline __m512 _mm512_castpd_ps(__m512d a) {
    return (__m512)a;
}
inline __m512i _mm512_castps_si512(__m512 a) {
    return (__m512i)a;
}
inline __m512 _mm512_castsi512_ps(__m512i a) {
    return (__m512)a;
}
inline __m128 _mm512_castps512_ps128(__m512 a) {
    return half<__m128>(a, 0);
}
inline __m256 _mm512_castps512_ps256(__m512 a) {
    return low(a);
}
inline __m256i _mm512_castsi512_si256(__m512i a) {
    return low(a);
}
inline __m512i _mm512_castsi256_si512(__m256i a) {
    return whole<__m512i>(a, _mm256_setzero_si256());
}
inline __m512 _mm512_broadcast_f32x8(__m256 a) {
    return whole<__m512>(a, a);
}
inline __m512i _mm512_broadcast_i64x4(__m256i a) {
    return whole<__m512i>(a, a);
}
inline __m512i _mm512_broadcast_i32x4(__m128i a) {
    return _mm512_broadcast_i64x4(_mm256_broadcastsi128_si256(a));
}
inline __m128 _mm512_extractf32x4_ps(__m512 a, int which) {
    return half<__m128>(a, which);
}
inline __m256 _mm512_extractf32x8_ps(__m512 a, int which) {
    return half<__m256>(a, which);
}
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int which) {
    return half<__m256i>(a, which);
}
inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int which) {
    return which ? whole<__m512i>(low(a), b) : whole<__m512i>(b, high(a));
}

template <class T>
__m512i every(T x) {
    SoftInts<T> all;
    for (T& item : all.at)
        item = x;
    return all.whole();
}
inline __m512i _mm512_set1_epi8(int8_t x) {
    return every(x);
}
inline __m512i _mm512_set1_epi16(int16_t x) {
    return every(x);
}
inline __m512i _mm512_set1_epi32(int32_t x) {
    return every(x);
}
inline __m512i _mm512_set1_epi64(int64_t x) {
    return every(x);
}
inline __m512 _mm512_set1_ps(float x) {
    return (__m512)every(x);
}
// Sets the items from the last to the first.
template <class T, class... All>
__m512i backwards(All... all) {
    const T items[] = {static_cast<T>(all)...};
    SoftInts<T> set;
    for (int i = 0; i < set.kCount; ++i)
        set.at[i] = items[set.kCount - 1 - i];
    return set.whole();
}
template <class... All>
__m512i _mm512_set_epi32(All... all) {
    return backwards<int32_t>(all...);
}
template <class... All>
__m512i _mm512_set_epi64(All... all) {
    return backwards<int64_t>(all...);
}

inline __m512i _mm512_loadu_si512(const void* p) {
    __m512i v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
inline __m512i _mm512_load_si512(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % 64)
        __builtin_trap();
    return _mm512_loadu_si512(p);
}
inline __m512 _mm512_loadu_ps(const void* p) {
    return (__m512)_mm512_loadu_si512(p);
}
inline void _mm512_storeu_si512(void* p, __m512i v) {
    std::memcpy(p, &v, sizeof(v));
}
inline void _mm512_storeu_ps(void* p, __m512 v) {
    std::memcpy(p, &v, sizeof(v));
}
inline void _mm512_store_ps(void* p, __m512 v) {
    if (reinterpret_cast<uintptr_t>(p) % 64)
        __builtin_trap();
    _mm512_storeu_ps(p, v);
}
// Only the items selected by the mask are accessed in memory.
template <class T, class V>
V load_some(uint64_t mask, const void* p) {
    SoftItems<T, V> items;
    for (int i = 0; i < items.kCount; ++i)
        if (mask >> i & 1)
            std::memcpy(items.at + i, static_cast<const T*>(p) + i, sizeof(T));
    return items.whole();
}
template <class T, class V>
void store_some(void* p, uint64_t mask, V v) {
    const SoftItems<T, V> items(v);
    for (int i = 0; i < items.kCount; ++i)
        if (mask >> i & 1)
            std::memcpy(static_cast<T*>(p) + i, items.at + i, sizeof(T));
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
    return load_some<uint16_t, __m512i>(mask, p);
}
inline __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
    return load_some<uint8_t, __m512i>(mask, p);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
    return load_some<float, __m512>(mask, p);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
    return load_some<uint16_t, __m256i>(mask, p);
}
inline __m256i _mm256_maskz_loadu_epi8(__mmask32 mask, const void* p) {
    return load_some<uint8_t, __m256i>(mask, p);
}
inline __m128i _mm_maskz_loadu_epi16(__mmask8 mask, const void* p) {
    return load_some<uint16_t, __m128i>(mask, p);
}
inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
    return load_some<uint8_t, __m128i>(mask, p);
}
inline void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i v) {
    store_some<uint16_t>(p, mask, v);
}
inline void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i v) {
    store_some<uint16_t>(p, mask, v);
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 v) {
    store_some<float>(p, mask, v);
}
template <class T>
__m512i blend(uint64_t mask, __m512i no, __m512i yes) {
    SoftInts<T> all(no), other(yes);
    for (int i = 0; i < all.kCount; ++i)
        if (mask >> i & 1)
            all.at[i] = other.at[i];
    return all.whole();
}
inline __m512i _mm512_maskz_mov_epi8(__mmask64 mask, __m512i v) {
    return blend<uint8_t>(mask, __m512i{}, v);
}
inline __m512i _mm512_mask_mov_epi32(__m512i no, __mmask16 mask, __m512i yes) {
    return blend<uint32_t>(mask, no, yes);
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
    return (__m512)blend<uint32_t>(mask, (__m512i)no, (__m512i)yes);
}
inline __m512 _mm512_mask_add_ps(__m512 no, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_blend_ps(mask, no, a + b);
}
inline __m512i _mm512_mask_shuffle_epi8(__m512i no, __mmask64 mask, __m512i a, __m512i b) {
    return blend<uint8_t>(mask, no, _mm512_shuffle_epi8(a, b));
}

} // namespace
} // namespace slipstream

#include "soft_avx512_items.h"
