// Products of 16-bit integers, sixteen at a time, for units that cannot sum byte products in int32.
#pragma once

namespace slipstream {
namespace {

struct Words {
    static constexpr int kWidth = 16;
    __m256i v;

    void store(int16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

    static Words load(const int16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    static Words load(const int8_t* p) {
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    // Unpack the low and the high nibbles of kWidth bytes.
    static void halves(const uint8_t* p, Words& low, Words& high) {
        const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        low.v = _mm256_and_si256(both, _mm256_set1_epi16(15));
        high.v = _mm256_srli_epi16(both, 4);
    }
    // Convert 64 fp6 codes with three mantissa bits to words. Their values are integer multiples of 1/8, up
    // to 60 of them. A code below 16 is its own value; the others are looked up.
    static void eighths(const uint8_t* codes, const uint8_t* crumbs, Words (&to)[4]) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i two =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(crumbs)));
        const __m256i large =
            _mm256_setr_epi8(16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60, 16, 18, 20, 22,
                             24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60);
#pragma GCC unroll 2
        for (int half = 0; half < 2;
             ++half) { // codes 16 * half to 16 * half + 16, and the sixteen that are 32 further on
            const __m256i four =
                _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
            const __m256i upper = _mm256_srlv_epi64(two, half ? _mm256_setr_epi64x(2, 2, 6, 6)
                                                              : _mm256_setr_epi64x(0, 0, 4, 4));
            const __m256i size =
                _mm256_blendv_epi8(four, _mm256_shuffle_epi8(large, four), _mm256_slli_epi16(upper, 7));
            const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(upper, 6), _mm256_set1_epi8(1));
            const __m256i whole = _mm256_sign_epi8(size, sign);
            to[half].v = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(whole));
            to[half + 2].v = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(whole, 1));
        }
    }
};

// Sums of the products of words, in int32.
struct WordSums {
    __m256i v = _mm256_setzero_si256();
};
inline WordSums dot(WordSums sum, Words a, Words b) {
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
}

// Pairs of words in 32-bit lanes, and sums of their products; as wide as Vec.
#ifdef SLIPSTREAM_AVX512
struct WordPairs {
    __m512i v;
    static WordPairs load(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
    // The W pairs at `p`, repeated over all lanes.
    template <int W>
    static WordPairs spread(const int16_t* p) {
        static_assert(W == 1 || W == 2 || W == 4, "as there are instructions");
        if constexpr (W == 1) {
            int32_t two;
            std::memcpy(&two, p, sizeof(two));
            return {_mm512_set1_epi32(two)};
        } else if constexpr (W == 2) {
            int64_t four;
            std::memcpy(&four, p, sizeof(four));
            return {_mm512_set1_epi64(four)};
        } else {
            return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
        }
    }
};
struct PairSums {
    typedef int32_t Lanes __attribute__((vector_size(64))); // see CodeSums
    Lanes v;
    static PairSums of(Vec x) { return {(Lanes)x.v}; }
    Vec bits() const { return {(__m512)v}; }
    Vec floats() const { return {_mm512_cvtepi32_ps((__m512i)v)}; }
};
inline PairSums dot(PairSums sum, WordPairs a, WordPairs b) {
    return {sum.v + (PairSums::Lanes)_mm512_madd_epi16(a.v, b.v)};
}
#else
struct WordPairs {
    __m256i v;
    static WordPairs load(const int16_t* p) { return {Words::load(p).v}; }
    // The W pairs at `p`, repeated over all lanes.
    template <int W>
    static WordPairs spread(const int16_t* p) {
        static_assert(W == 1 || W == 2 || W == 4, "as there are instructions");
        if constexpr (W == 1) {
            int32_t two;
            std::memcpy(&two, p, sizeof(two));
            return {_mm256_set1_epi32(two)};
        } else if constexpr (W == 2) {
            int64_t four;
            std::memcpy(&four, p, sizeof(four));
            return {_mm256_set1_epi64x(four)};
        } else {
            return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
        }
    }
};
struct PairSums {
    __m256i v;
    static PairSums of(Vec x) { return {_mm256_castps_si256(x.v)}; }
    Vec bits() const { return {_mm256_castsi256_ps(v)}; }
    Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }
};
inline PairSums dot(PairSums sum, WordPairs a, WordPairs b) {
    // A single asm statement: otherwise gcc computes all products of a block before it adds them, and spills
    // them to the stack; if only the order is enforced, it copies each sum once per step.
    __m256i products;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.v), "=&x"(products) : "xm"(a.v), "x"(b.v));
    return sum;
}
#endif

// The sums in float32.
struct WordTotals {
    __m256 v = _mm256_setzero_ps();
    static WordTotals of(WordSums sum) { return {_mm256_cvtepi32_ps(sum.v)}; }
    // Reduce a Vec to half its width, where it is wider than WordTotals; the total is the same.
    static WordTotals folded(Vec x) {
#ifdef SLIPSTREAM_AVX512
        return {_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1))};
#else
        return {x.v};
#endif
    }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
};
// Return a * factor + b.
inline WordTotals fma(WordTotals a, float factor, WordTotals b) {
    return {_mm256_fmadd_ps(a.v, _mm256_set1_ps(factor), b.v)};
}
inline WordTotals operator+(WordTotals a, WordTotals b) {
    return {_mm256_add_ps(a.v, b.v)};
}

} // namespace
} // namespace slipstream
