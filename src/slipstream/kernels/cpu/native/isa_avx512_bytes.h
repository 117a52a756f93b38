// Products of bytes (AVX-512 VNNI), and conversion of packed codes to bytes.
#pragma once

namespace slipstream {
namespace {

// 64 bytes; `dot` sums products of four bytes each in int32, the left operand being unsigned. A Vec holds the
// bits of such sums.
struct Codes {
    __m512i v;
    static Codes set(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
    static Codes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    static Codes load(const uint8_t* p, int64_t n) {
        return {_mm512_maskz_loadu_epi8(n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}, p)};
    }
    void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
    // The W fours at `p`, repeated over all lanes; the last of a row may have only n numbers.
    template <int W>
    static Codes spread(const uint8_t* p, int64_t n = 4 * W) {
        return {spread_bytes<4 * W>(p, n)};
    }
};
// Combine four integers below 256 per lane into its bytes.
inline Codes four_of(Vec a, Vec b, Vec c, Vec d) {
    const __m512i low =
        _mm512_or_si512(_mm512_cvtps_epi32(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 8));
    const __m512i high =
        _mm512_or_si512(_mm512_cvtps_epi32(c.v), _mm512_slli_epi32(_mm512_cvtps_epi32(d.v), 8));
    return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
inline Vec dot(Vec sum, Codes x, Codes w) {
    return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum.v), x.v, w.v))};
}
// Such sums in int32, of the type that the instruction takes: gcc 12 copies other types to the stack in every
// step.
struct CodeSums {
    typedef int32_t Lanes __attribute__((vector_size(64)));
    Lanes v;
    static CodeSums of(Vec x) { return {(Lanes)x.v}; }
    Vec bits() const { return {(__m512)v}; }
};
inline CodeSums dot(CodeSums sum, Codes x, Codes w) {
    return {(CodeSums::Lanes)_mm512_dpbusd_epi32((__m512i)sum.v, x.v, w.v)};
}
// Return 256 * sum, to which the sums of the next lower digits are added.
inline CodeSums raise(CodeSums sum) {
    return {(CodeSums::Lanes)_mm512_slli_epi32((__m512i)sum.v, 8)};
}
inline CodeSums operator+(CodeSums a, CodeSums b) {
    return {a.v + b.v};
}
inline Vec as_floats(CodeSums sum) {
    return {_mm512_cvtepi32_ps((__m512i)sum.v)};
}
// Add lanes 2i and 2i + 1 of a and of b, in the order of the `fold` of floats.
inline CodeSums fold(CodeSums a, CodeSums b) {
    const __m512 x = a.bits().v, y = b.bits().v;
    const __m512i first = _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88));
    return {(CodeSums::Lanes)_mm512_add_epi32(first, _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)))};
}
// Shift bytes from [-128, 127] to [0, 255].
inline Codes less_least(Codes x) {
    return {_mm512_xor_si512(x.v, _mm512_set1_epi8(-128))};
}
// Shift the first n bytes from [-128, 127] to [0, 255]; the others become zero.
inline Codes less_least(Codes x, int64_t n) {
    return {_mm512_maskz_mov_epi8((uint64_t{1} << n) - 1, less_least(x).v)};
}
// Store the sum of each four adjacent lanes.
inline void store_fours(CodeSums sum, float* out) {
    __m512 s = as_floats(sum).v;
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
}
// Store integers as signed 8-bit digits, the highest first, `apart` bytes from each other: the integer is the
// sum of digit i * 256^(count - 1 - i).
inline void store_digits(Vec whole, int count, uint8_t* p, int64_t apart) {
    __m512i left = _mm512_cvtps_epi32(whole.v);
    for (int i = count - 1; i >= 0; --i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * apart), _mm512_cvtepi32_epi8(left));
        left = _mm512_srai_epi32(_mm512_add_epi32(left, _mm512_set1_epi32(128)), 8);
    }
}
// Return sum - a * b, of integers, in float32.
inline Vec less_product(Vec sum, Vec a, Vec b) {
    const __m512i product = _mm512_mullo_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v));
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_castps_si512(sum.v), product))};
}
inline Vec integers(int32_t x) {
    return {_mm512_castsi512_ps(_mm512_set1_epi32(x))};
}
inline int32_t sum_of_integers(Vec x) {
    return _mm512_reduce_add_epi32(_mm512_castps_si512(x.v));
}
// 64 int8 codes plus kAdded, which makes them unsigned.
struct Int8Bytes {
    static constexpr int kAdded = 128;
    static constexpr float kUnit = 1;
    static void ask(const PackedRow& row, int64_t k) { prefetch(row.codes + k + kAhead); }
    static Codes load(const PackedRow& row, int64_t k) { return less_least(Codes::load(row.codes + k)); }
    static Codes load(const PackedRow& row, int64_t k, int64_t n) {
        return less_least(Codes::load(row.codes + k, n));
    }
};

// The unsigned bytes of fp6 codes with three mantissa bits, whose values are integer multiples of 1/8, up to
// 60 of them: the multiple plus Fp6Bytes::kAdded.
struct ByteEighths {
    alignas(64) uint8_t values[64] = {};
};
constexpr ByteEighths fp6_eighths() {
    ByteEighths t;
    for (int c = 0; c < 64; ++c) {
        const int m = c & 7, e = c >> 3 & 3, size = e ? (8 + m) << (e - 1) : m;
        t.values[c] = static_cast<uint8_t>(64 + (c & 32 ? -size : size));
    }
    return t;
}
constexpr ByteEighths kFp6Eighths = fp6_eighths();

struct Fp6Bytes {
    static constexpr int kAdded = 64;
    static constexpr float kUnit = 0.125f;
    static Codes of(Codes codes) {
        return {_mm512_permutexvar_epi8(codes.v, _mm512_load_si512(kFp6Eighths.values))};
    }
};

// 128 int4 codes: the codes of each 32 inputs are in 16 bytes, the first sixteen in the low nibbles.
struct Nibbles {
    Codes low, high;
    explicit Nibbles(Codes both) {
#ifndef SLIPSTREAM_EMULATE_AVX512
        __asm__("" : "+v"(both.v)); // otherwise it is loaded twice
#endif
        const __m512i mask = _mm512_set1_epi8(15);
        low.v = _mm512_and_si512(both.v, mask);
        high.v = _mm512_and_si512(_mm512_srli_epi16(both.v, 4), mask);
    }
    // Store the codes in input order, the second 64 of them `apart` bytes from the first.
    void store(uint8_t* p, int64_t apart = 64) const {
        const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        const __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
        _mm512_storeu_si512(p, _mm512_permutex2var_epi64(low.v, first, high.v));
        _mm512_storeu_si512(p + apart, _mm512_permutex2var_epi64(low.v, second, high.v));
    }
};

} // namespace
} // namespace slipstream
