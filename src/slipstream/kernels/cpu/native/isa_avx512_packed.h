// Conversion of packed codes to lanes of bfloat16 by lookup tables in registers (AVX-512 VBMI); every code of
// every format is exact in bfloat16.
#pragma once

namespace slipstream {
namespace {

// Return the bits of m * 2^e in bfloat16, for m < 256.
constexpr uint16_t bf16_bits(int m, int e) {
    if (m == 0)
        return 0;
    while (m < 128) {
        m *= 2;
        --e;
    }
    return static_cast<uint16_t>((e + 7 + 127) << 7 | (m & 127));
}

// Return the bfloat16 bits of a minifloat with `mantissa` bits below the exponent.
constexpr uint16_t minifloat_bits(int code, int mantissa, int bias) {
    const int m = code & ((1 << mantissa) - 1), e = code >> mantissa;
    return e ? bf16_bits(m + (1 << mantissa), e - bias - mantissa) : bf16_bits(m, 1 - bias - mantissa);
}

// The two bytes of the bfloat16 of each code: of 7-bit codes without their sign, or of 6-bit codes with it.
struct ByteTable {
    alignas(64) uint8_t high[128] = {}, low[128] = {};
    constexpr void put(int code, int bits) {
        high[code] = static_cast<uint8_t>(bits >> 8);
        low[code] = static_cast<uint8_t>(bits & 255);
    }
};

constexpr ByteTable int8_table() {
    ByteTable t;
    for (int c = 0; c < 128; ++c)
        t.put(c, bf16_bits(c, 0));
    return t;
}
constexpr ByteTable fp8_table() {
    ByteTable t;
    for (int c = 0; c < 128; ++c)
        t.put(c, minifloat_bits(c, 3, 7));
    return t;
}
constexpr ByteTable fp6_table(int mantissa, int bias) {
    ByteTable t;
    for (int c = 0; c < 64; ++c)
        t.put(c, minifloat_bits(c & 31, mantissa, bias) | (c >> 5) << 15);
    return t;
}
constexpr ByteTable kInt8Table = int8_table(), kFp8Table = fp8_table();
constexpr ByteTable kE2m3Table = fp6_table(3, 1), kE3m2Table = fp6_table(2, 3);

struct WordTable {
    alignas(64) uint16_t values[32] = {};
};
// The int4 codes minus eight, stored twice, so that an index of five bits needs no mask.
constexpr WordTable nibble_table() {
    WordTable t;
    for (int c = 0; c < 32; ++c) {
        const int code = (c & 15) - 8;
        t.values[c] = static_cast<uint16_t>(bf16_bits(code < 0 ? -code : code, 0) | (code < 0) << 15);
    }
    return t;
}
constexpr WordTable even_words() {
    WordTable t;
    for (int i = 0; i < 32; ++i)
        t.values[i] = static_cast<uint16_t>(2 * i);
    return t;
}
constexpr WordTable kNibbleTable = nibble_table(), kEvenWords = even_words();

inline void copy_lanes(const Bf16* from, Bf16* to) {
    for (int j = 0; j < 128; j += 32)
        _mm512_storeu_si512(to + j, _mm512_loadu_si512(from + j));
}

// Reorder 128 inputs to the order in which `Int4Codes::load` produces their weights: lane w of register i has
// the weight of nibble i of word w of 64 bytes of codes, which is input 32 * (w / 8) + 2 * (w % 8) + i / 2 +
// 16 * (i % 2).
inline void interleave_nibbles(const Bf16* from, Bf16* to) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    const __m512i c = _mm512_loadu_si512(from + 64), d = _mm512_loadu_si512(from + 96);
    const __m512i even = _mm512_load_si512(kEvenWords.values);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    for (int half = 0; half < 2; ++half) {
        const __m512i ab = half ? _mm512_shuffle_i64x2(a, b, 0xee) : _mm512_shuffle_i64x2(a, b, 0x44);
        const __m512i cd = half ? _mm512_shuffle_i64x2(c, d, 0xee) : _mm512_shuffle_i64x2(c, d, 0x44);
        _mm512_storeu_si512(to + 32 * half, _mm512_permutex2var_epi16(ab, even, cd));
        _mm512_storeu_si512(to + 32 * (half + 2), _mm512_permutex2var_epi16(ab, odd, cd));
    }
}

// Within each 128-bit lane: dword d of register q becomes dword q of register d.
inline void turn_dwords(__m512i (&v)[4]) {
    const __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), high = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i next_low = _mm512_unpacklo_epi32(v[2], v[3]), next_high = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(low, next_low);
    v[1] = _mm512_unpackhi_epi64(low, next_low);
    v[2] = _mm512_unpacklo_epi64(high, next_high);
    v[3] = _mm512_unpackhi_epi64(high, next_high);
}

// Reorder four times 128 inputs from `interleave_nibbles`, `step` elements apart, to the order of
// `Int4Codes::turned`.
inline void turn_nibbles(Bf16* x, int64_t step) {
    for (int64_t j = 0; j < 128; j += 32) {
        __m512i v[4];
        for (int q = 0; q < 4; ++q)
            v[q] = _mm512_loadu_si512(x + q * step + j);
        turn_dwords(v);
        for (int q = 0; q < 4; ++q)
            _mm512_storeu_si512(x + q * step + j, v[q]);
    }
}

// Reorder 64 inputs to the order of `Int4Codes::wide`: the first half of each 32, then the second.
inline void part_nibbles(const Bf16* from, Bf16* to) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    _mm512_storeu_si512(to, _mm512_shuffle_i64x2(a, b, 0x44));
    _mm512_storeu_si512(to + 32, _mm512_shuffle_i64x2(a, b, 0xee));
}

// Conversion of 64 codes, which are bytes or have been assembled to bytes, to two registers of bfloat16 in
// order.
struct ByteCodes {
    static constexpr int kLanes = 2, kStep = 64;
    static __m512i order() { return _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); }
    static void join(__m512i high, __m512i low, Bf16Lanes* to) {
        to[0].v = _mm512_unpacklo_epi8(low, high);
        to[1].v = _mm512_unpackhi_epi8(low, high);
    }
};

// Codes with a sign bit and seven more bits; `kAbsolute`: in two's complement.
template <bool kAbsolute>
struct SignedBytes : ByteCodes {
    explicit SignedBytes(const Matrix&) {
        const ByteTable& t = kAbsolute ? kInt8Table : kFp8Table;
        for (int i = 0; i < 2; ++i) {
            high[i] = _mm512_load_si512(t.high + 64 * i);
            low[i] = _mm512_load_si512(t.low + 64 * i);
        }
    }
    template <int64_t kDistance>
    static void ask(const PackedRow& row, int64_t k) {
        prefetch(row.codes + k + kDistance);
    }
    [[gnu::always_inline]] void make(__m512i codes, Bf16Lanes* to) const {
        codes = _mm512_permutexvar_epi64(order(), codes);
        const __m512i size = kAbsolute ? _mm512_abs_epi8(codes) : codes;
        const __m512i upper = _mm512_permutex2var_epi8(high[0], size, high[1]);
        const __m512i lower = _mm512_permutex2var_epi8(low[0], size, low[1]);
        // 0xf8: upper | (codes & sign)
        join(_mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8(-128), 0xf8), lower, to);
    }
    [[gnu::always_inline]] void load(const PackedRow& row, int64_t k, Bf16Lanes* to) const {
        make(_mm512_loadu_si512(row.codes + k), to);
    }
    [[gnu::always_inline]] void load(const PackedRow& row, int64_t k, int64_t n, Bf16Lanes* to) const {
        make(_mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, row.codes + k), to);
    }
    __m512i high[2], low[2];
};
using Int8Codes = SignedBytes<true>;
using Fp8Codes = SignedBytes<false>;

// Conversion of bf13, whose bytes are stored in the order in which joining them yields words in input order.
struct Bf13Codes {
    static constexpr int kLanes = 2, kStep = 64;
    explicit Bf13Codes(const Matrix&)
        : table(_mm512_broadcast_i32x4(Bf13Upper::below())),
          above(_mm512_broadcast_i32x4(Bf13Upper::above())) {}
    template <int64_t kDistance>
    static void ask(const PackedRow& row, int64_t k) {
        ask_bf13(row.codes + bf13_at(k), kDistance);
    }
    [[gnu::always_inline]] void load(const PackedRow& row, int64_t k, Bf16Lanes* to) const {
        const uint8_t* block = row.codes + bf13_at(k);
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64));
        __m512i four = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
        four = _mm512_and_si512(four, _mm512_set1_epi8(15));
        uint64_t fifth;
        std::memcpy(&fifth, block + 96, sizeof(fifth));
        __m512i high = _mm512_shuffle_epi8(table, four);
        high = _mm512_mask_shuffle_epi8(high, fifth, above, four);
        const __m512i low = _mm512_loadu_si512(block);
        to[0].v = _mm512_unpacklo_epi8(low, high);
        to[1].v = _mm512_unpackhi_epi8(low, high);
    }
    // The last block is padded, and is read to its end.
    [[gnu::always_inline]] void load(const PackedRow& row, int64_t k, int64_t, Bf16Lanes* to) const {
        load(row, k, to);
    }
    __m512i table, above;
};

// Six-bit codes in one byte each, whose two upper bits are undefined. `plain` yields 64 inputs in order.
// `turned` yields 256 inputs in four registers, each of which has sixteen of each group in a separate
// quarter, so that a lane of any sum over them belongs to one group.
struct Sixes {
    static constexpr int64_t kTurned = 256;
    // Combine the low four bits of `four` with the other bits of `two`.
    static Codes join(__m512i four, __m512i two) {
        return {_mm512_ternarylogic_epi32(two, four, _mm512_set1_epi8(15), 0xd8)};
    }
    [[gnu::always_inline]] static Codes plain(const uint8_t* codes, const uint8_t* upper) {
        __m512i four = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        four = _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), four);
        four = _mm512_srlv_epi64(four, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
        const __m512i two = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
        return join(four, _mm512_rolv_epi64(two, _mm512_set_epi64(62, 62, 0, 0, 2, 2, 4, 4)));
    }
    [[gnu::always_inline]] static void turned(const uint8_t* codes, const uint8_t* upper, Codes (&to)[4]) {
        const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
        const __m512i first = _mm512_shuffle_i64x2(a, b, 0x88), second = _mm512_shuffle_i64x2(a, b, 0xdd);
        const __m512i two = _mm512_loadu_si512(upper);
        to[0] = join(first, _mm512_slli_epi16(two, 4));
        to[1] = join(_mm512_srli_epi16(first, 4), _mm512_slli_epi16(two, 2));
        to[2] = join(second, two);
        to[3] = join(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(two, 2));
    }
    // Prefetch what follows 256 inputs.
    template <int64_t kDistance>
    static void ask(const uint8_t* codes, const uint8_t* upper, const Half* scales) {
        prefetch(codes + kDistance);
        prefetch(codes + 64 + kDistance);
        prefetch(upper + kDistance / 2);
        prefetch(reinterpret_cast<const char*>(scales) + kDistance / 16);
    }
};

// Conversion of a register of Sixes to two registers of bfloat16, in the order in which byte unpacking leaves
// them.
struct Fp6Codes {
    explicit Fp6Codes(const Matrix& m) {
        const ByteTable& t = m.format == kFp6E2m3 ? kE2m3Table : kE3m2Table;
        high = _mm512_load_si512(t.high);
        low = _mm512_load_si512(t.low);
    }
    [[gnu::always_inline]] Bf16Lanes some(Codes codes, int half) const {
        const __m512i upper = _mm512_permutexvar_epi8(codes.v, high);
        const __m512i lower = _mm512_permutexvar_epi8(codes.v, low);
        return {half ? _mm512_unpackhi_epi8(lower, upper) : _mm512_unpacklo_epi8(lower, upper)};
    }
    __m512i high, low;
};

// Quarter q of register d becomes quarter d of register q.
inline void turn_quarters(__m512i (&v)[4]) {
    const __m512i even = _mm512_shuffle_i64x2(v[0], v[1], 0x88), odd = _mm512_shuffle_i64x2(v[0], v[1], 0xdd);
    const __m512i next_even = _mm512_shuffle_i64x2(v[2], v[3], 0x88);
    const __m512i next_odd = _mm512_shuffle_i64x2(v[2], v[3], 0xdd);
    v[0] = _mm512_shuffle_i64x2(even, next_even, 0x88);
    v[1] = _mm512_shuffle_i64x2(odd, next_odd, 0x88);
    v[2] = _mm512_shuffle_i64x2(even, next_even, 0xdd);
    v[3] = _mm512_shuffle_i64x2(odd, next_odd, 0xdd);
}

// Reorder twice 128 inputs, `step` elements apart, to the order of Sixes::turned with Fp6Codes.
inline void turn_sixes(Bf16* x, int64_t step) {
    __m512i v[2][4];
    for (int half = 0; half < 2; ++half) {
        for (int q = 0; q < 4; ++q)
            v[half][q] = _mm512_loadu_si512(x + q / 2 * step + q % 2 * 64 + half * 32);
        turn_quarters(v[half]);
    }
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 4; ++i)
            _mm512_storeu_si512(x + half * step + i * 32, v[half][i]);
}

// Reorder 64 inputs to the order of Sixes::plain with Fp6Codes.
inline void part_sixes(Bf16* x) {
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32);
    const __m512i first = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0);
    _mm512_storeu_si512(x, _mm512_permutex2var_epi64(a, first, b));
    _mm512_storeu_si512(x + 32,
                        _mm512_permutex2var_epi64(a, _mm512_add_epi64(first, _mm512_set1_epi64(2)), b));
}

// Conversion of 128 four-bit codes to four registers of bfloat16, in the order of `interleave_nibbles`; the
// sums of products still have to be multiplied by the group's scale.
struct Int4Codes {
    static constexpr int kLanes = 4, kStep = 128;
    Int4Codes() : table(_mm512_load_si512(kNibbleTable.values)) {}
    [[gnu::always_inline]] void make(__m512i codes, Bf16Lanes* to) const {
        for (int i = 0; i < 4; ++i)
            to[i] = some({codes}, i);
    }
    [[gnu::always_inline]] void load(const uint8_t* p, Bf16Lanes* to) const {
        make(_mm512_loadu_si512(p), to);
    }
    [[gnu::always_inline]] void load(const uint8_t* p, int64_t bytes, Bf16Lanes* to) const {
        make(_mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p), to);
    }
    // The weights of nibble i of each word.
    [[gnu::always_inline]] Bf16Lanes some(Codes codes, int i) const {
        return {_mm512_permutexvar_epi16(i ? _mm512_srli_epi16(codes.v, 4 * i) : codes.v, table)};
    }
    // Load 512 codes such that a lane only has codes of one 32-input block: lane 4 * l + q those of block 4 *
    // q + l.
    [[gnu::always_inline]] static void turned(const uint8_t* p, Codes (&to)[4]) {
        __m512i v[4];
        for (int q = 0; q < 4; ++q)
            v[q] = _mm512_loadu_si512(p + 64 * q);
        turn_dwords(v);
        for (int q = 0; q < 4; ++q)
            to[q].v = v[q];
    }
    // Load n <= 32 bytes, each into a word of its own.
    [[gnu::always_inline]] static Codes wide(const uint8_t* p, int64_t n) {
        const auto some = static_cast<__mmask32>((uint64_t{1} << n) - 1);
        return {_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(some, p))};
    }
    __m512i table;
};

} // namespace
} // namespace slipstream
