// The scales and minima of groups of packed weights, distributed to the lanes of the products that they apply
// to.
#pragma once

namespace slipstream {
namespace {

// Distributes the numbers of the groups in 128 inputs: lane j of a sum over Nibbles belongs to the 32 inputs
// with index j / 4.
struct GroupNumbers {
    explicit GroupNumbers(int64_t group) {
        const int shift = group == 32 ? 0 : (group == 64 ? 1 : 2);
        const __m128i block = _mm_srl_epi16(_mm_set_epi16(3, 3, 2, 2, 1, 1, 0, 0), _mm_cvtsi32_si128(shift));
        const __m256i pairs = _mm256_cvtepu16_epi32(block); // the lower byte of a number, and the upper one
        index = _mm256_add_epi8(_mm256_mullo_epi32(pairs, _mm256_set1_epi32(0x02020202)),
                                _mm256_set1_epi32(0x01000100));
    }
    // Reads `count` (or kCount) numbers, at most as many as 128 inputs have.
    template <int kCount>
    Vec of(const Half* p) const {
        int64_t numbers = 0;
        std::memcpy(&numbers, p, kCount * sizeof(*p));
        return {_mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi64x(numbers), index))};
    }
    Vec of(const Half* p, int64_t count) const {
        int64_t numbers = 0;
        for (int64_t i = 0; i < count; ++i)
            numbers |= static_cast<int64_t>(p[i].bits) << 16 * i;
        return {_mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi64x(numbers), index))};
    }
    __m256i index;
};

// Return one number in all lanes.
inline Vec everywhere(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(p->bits)))};
}

// Selects one of sixteen numbers for each lane.
struct Lanes16 {
    __m512i index;
    Vec of(Vec numbers) const { return {_mm512_permutexvar_ps(index, numbers.v)}; }
};

// Distributes sixteen numbers, one per group, to the lanes of products of Int4Codes, whose lane j belongs to
// the 32 inputs with index j / 4; `t` is the index of the chunk of 128 inputs.
struct GroupSpread {
    explicit GroupSpread(int64_t group) {
        const int shift = group == 32 ? 0 : (group == 64 ? 1 : 2);
        const __m512i block = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        first = _mm512_srl_epi32(block, _mm_cvtsi32_si128(shift));
        step = static_cast<int>(128 / group);
    }
    Lanes16 lanes(int64_t t) const {
        return {_mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(t) * step))};
    }
    __m512i first;
    int step;
};

// The last 64 inputs or fewer of two rows of int4, with the second row in the upper half of a register:
// `bytes` bytes of codes and one or two groups each.
struct RowEnds {
    RowEnds(int64_t bytes, int64_t groups)
        : codes_there(static_cast<__mmask32>((uint64_t{1} << bytes) - 1)),
          numbers_there(static_cast<__mmask8>((1 << groups) - 1)),
          lanes({groups == 1 ? _mm512_set_epi32(8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0)
                             : _mm512_set_epi32(9, 9, 9, 9, 8, 8, 8, 8, 1, 1, 1, 1, 0, 0, 0, 0)}) {}
    Codes codes(const uint8_t* a, const uint8_t* b) const {
        const __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(codes_there, a));
        return {_mm512_inserti64x4(first, _mm256_maskz_loadu_epi8(codes_there, b), 1)};
    }
    Vec numbers(const Half* a, const Half* b) const {
        const __m256i first = _mm256_castsi128_si256(_mm_maskz_loadu_epi16(numbers_there, a));
        return {_mm512_cvtph_ps(_mm256_inserti128_si256(first, _mm_maskz_loadu_epi16(numbers_there, b), 1))};
    }
    // Load what both rows are multiplied by into both halves.
    static Codes both(const uint8_t* p) {
        return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Vec both(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
    // Add each half to the sum of its row.
    static void part(Vec pair, Vec& a, Vec& b) {
        a.v = _mm512_mask_add_ps(a.v, 0x00ff, a.v, pair.v);
        b.v = _mm512_mask_add_ps(b.v, 0xff00, b.v, pair.v);
    }
    __mmask32 codes_there;
    __mmask8 numbers_there;
    Lanes16 lanes; // selects the entry of `numbers` for each lane of a product
};

// Distributes the numbers of the groups of consecutive inputs to the lanes of products: `turned` with 512
// inputs of Int4Codes::turned, `quarters` with 128 inputs, of which lane j has some of the 32 with index j /
// 4, and `halves` with the 64 inputs of Int4Codes::wide.
struct TurnedSpread {
    explicit TurnedSpread(int64_t group) {
        const __m128i shift = _mm_cvtsi32_si128(group == 32 ? 0 : (group == 64 ? 1 : 2));
        const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        const __m512i sixteen = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        turned.index = _mm512_srl_epi32(sixteen, shift);
        quarters.index = _mm512_srl_epi32(four, shift);
        halves.index = _mm512_srl_epi32(_mm512_srli_epi32(four, 1), shift);
    }
    Lanes16 turned, quarters, halves;
};

} // namespace
} // namespace slipstream
