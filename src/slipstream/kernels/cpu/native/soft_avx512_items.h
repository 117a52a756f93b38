// The rest of soft_avx512.h: instructions emulated item by item, and the products of bfloat16 and of bytes.
#pragma once

namespace slipstream {
namespace {

template <class T>
__m512i pick(__m512i index, __m512i from) {
    const SoftInts<T> at(index), items(from);
    SoftInts<T> all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = items.at[at.at[i] & (all.kCount - 1)];
    return all.whole();
}
template <class T>
__m512i pick_of_two(__m512i a, __m512i index, __m512i b) {
    const SoftInts<T> at(index), first(a), second(b);
    SoftInts<T> all;
    for (int i = 0; i < all.kCount; ++i) {
        const auto which = at.at[i] & (2 * all.kCount - 1);
        all.at[i] = which < all.kCount ? first.at[which] : second.at[which - all.kCount];
    }
    return all.whole();
}
inline __m512i _mm512_permutexvar_epi8(__m512i index, __m512i a) {
    return pick<uint8_t>(index, a);
}
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
    return pick<uint16_t>(index, a);
}
inline __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
    return pick<int64_t>(index, a);
}
inline __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
    return (__m512)pick<int32_t>(index, (__m512i)a);
}
inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
    return pick_of_two<uint8_t>(a, index, b);
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    return pick_of_two<uint16_t>(a, index, b);
}
inline __m512i _mm512_permutex2var_epi64(__m512i a, __m512i index, __m512i b) {
    return pick_of_two<int64_t>(a, index, b);
}
inline __m512 _mm512_permute_ps(__m512 a, int order) {
    const SoftFloats from(a);
    SoftFloats all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = from.at[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
    return all.whole();
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int order) {
    const SoftFloats first(a), second(b);
    SoftFloats all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = (i % 4 < 2 ? first : second).at[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
    return all.whole();
}
inline __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int order) {
    const SoftInts<int64_t> first(a), second(b);
    SoftInts<int64_t> all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = (i < 4 ? first : second).at[(order >> i / 2 * 2 & 3) * 2 + i % 2];
    return all.whole();
}
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
    return (__m512)_mm512_shuffle_i64x2((__m512i)a, (__m512i)b, order);
}
inline __m512 _mm512_castps128_ps512(__m128 a) {
    SoftFloats all;
    std::memcpy(all.at, &a, sizeof(a));
    return all.whole();
}
inline __m512 _mm512_insertf32x4(__m512 a, __m128 b, int which) {
    SoftFloats all(a);
    std::memcpy(all.at + 4 * which, &b, sizeof(b));
    return all.whole();
}
inline __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    return (__m512d)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
}
inline __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return (__m512d)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
}

// Truncates each item to the narrower type.
template <class V, class From, class To, class X>
V cut(X x) {
    const SoftItems<From, X> from(x);
    SoftItems<To, V> all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = static_cast<To>(from.at[i]);
    return all.whole();
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
    return cut<__m256i, uint32_t, uint16_t>(a);
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
    return cut<__m128i, uint32_t, uint8_t>(a);
}
inline __m128i _mm256_cvtepi16_epi8(__m256i a) {
    return cut<__m128i, uint16_t, uint8_t>(a);
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int kind) {
    const SoftFloats x(a), y(b);
    int mask = 0;
    for (int i = 0; i < x.kCount; ++i) {
        const bool is = kind == _CMP_UNORD_Q ? std::isnan(x.at[i]) || std::isnan(y.at[i])
                                             : x.at[i] < y.at[i]; // _CMP_LT_OQ, the only other kind used
        mask |= is << i;
    }
    return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_rcp14_ps(__m512 a) {
    return 1.0f / a; // more precise than required
}
// a times 2 to the power of floor(b).
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    const SoftFloats x(a), n(b);
    SoftFloats all;
    for (int i = 0; i < all.kCount; ++i) {
        const float bounded = std::fmin(std::fmax(n.at[i], -1000.0f), 1000.0f);
        all.at[i] =
            std::isnan(n.at[i]) ? n.at[i] : std::ldexp(x.at[i], static_cast<int>(std::floor(bounded)));
    }
    return all.whole();
}

inline int32_t _mm512_reduce_add_epi32(__m512i a) {
    const SoftInts<uint32_t> items(a);
    uint32_t sum = 0;
    for (const uint32_t item : items.at)
        sum += item;
    return static_cast<int32_t>(sum);
}
inline float _mm512_reduce_add_ps(__m512 a) {
    SoftFloats items(a);
    for (int n = items.kCount / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i)
            items.at[i] += items.at[i + n];
    return items.at[0];
}
inline float _mm512_reduce_max_ps(__m512 a) {
    SoftFloats items(a);
    for (int n = items.kCount / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i)
            items.at[i] = items.at[i] > items.at[i + n] ? items.at[i] : items.at[i + n];
    return items.at[0];
}

// Rounds to the nearest even bfloat16; subnormal numbers become zero.
inline uint16_t rounded_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (std::isnan(x))
        bits |= 0x400000;
    else if (!std::isnormal(x) && !std::isinf(x))
        bits &= 0x80000000;
    else
        bits += 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>(bits >> 16);
}
inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
    const SoftFloats from(a);
    SoftItems<uint16_t, __m256bh> all;
    for (int i = 0; i < all.kCount; ++i)
        all.at[i] = rounded_bits(from.at[i]);
    return all.whole();
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    return whole<__m512bh>(_mm512_cvtneps_pbh(lower), _mm512_cvtneps_pbh(upper));
}
inline __m512 flushed(SoftWords bits) {
    const SoftWords small = (SoftWords)((bits & 0x7f800000) == 0);
    return (__m512)(bits & ~(small & 0x7fffffff));
}
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    const SoftWords x = (SoftWords)a, y = (SoftWords)b;
    sums = _mm512_fmadd_ps(flushed(x & 0xffff0000), flushed(y & 0xffff0000), sums);
    return flushed((SoftWords)_mm512_fmadd_ps(flushed(x << 16), flushed(y << 16), sums));
}
// Sums of four byte products each; a is unsigned.
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    SoftWords all = (SoftWords)sums;
    for (int shift = 0; shift < 32; shift += 8)
        all += ((SoftWords)a >> shift & 255) * (SoftWords)((SoftSigned)b << (24 - shift) >> 24);
    return (__m512i)all;
}

} // namespace
} // namespace slipstream
