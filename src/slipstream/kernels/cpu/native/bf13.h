// Decoding of bf13 blocks, and definitions that several decoders share.
//
// Source: the docstring of formats/bf13.py, which shows the byte layout.
#pragma once

namespace slipstream {
namespace {

// Number of inputs decoded at a time: one block of fp6 or bf13, two of int4.
constexpr int64_t kPackedBlock = 64;
constexpr int64_t kBf13Bytes = kPackedBlock / 8 * 13; // of a block

// Return the byte offset of the block that starts with input `from` of a row.
constexpr int64_t bf13_at(int64_t from) {
    return from / kPackedBlock * kBf13Bytes;
}

// Prefetch the block `ahead` bytes further on; a block extends over two or three cache lines.
inline void ask_bf13(const uint8_t* block, int64_t ahead) {
    prefetch(block + ahead);
    prefetch(block + ahead + kBf13Bytes / 2);
}

// Sixteen bytes as a compiler vector, which exists on every machine: byte by byte, the compiler cannot rule
// out aliasing, and wide loads of data that was written by narrow stores are slow.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));

inline Bytes16 sixteen(const uint8_t* from) {
    Bytes16 bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return bytes;
}

#ifdef __AVX2__
// The upper byte of a bfloat16 by its sign and the lower three of its exponent's four stored bits; `above` is
// for codes whose fourth bit is set.
struct Bf13Upper {
    static __m128i below() {
        return _mm_set_epi8(-73, -74, -75, -76, -77, -78, -79, -128, 55, 54, 53, 52, 51, 50, 49, 0);
    }
    static __m128i above() {
        return _mm_set_epi8(-65, -66, -67, -68, -69, -70, -71, -72, 63, 62, 61, 60, 59, 58, 57, 56);
    }
};
#endif

#ifdef __AVX2__
// Call take(at, numbers at to at + 16 of a block). In the packed bytes, each lane of sixteen holds eight
// numbers of either half of the block.
template <class F>
[[gnu::always_inline]] inline void each_bf13(const uint8_t* block, F take) {
    const auto load = [&](int at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at));
    };
    const __m256i both = load(kPackedBlock), fifteen = _mm256_set1_epi8(15);
    const __m256i below = _mm256_broadcastsi128_si256(Bf13Upper::below());
    const __m256i above = _mm256_broadcastsi128_si256(Bf13Upper::above());
    const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        int32_t fifth;
        std::memcpy(&fifth, block + 96 + 4 * half, sizeof(fifth));
        const __m256i four = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, fifteen);
        const __m256i some = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(fifth), bytes), bits);
        const __m256i high =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(below, four), _mm256_shuffle_epi8(above, four),
                               _mm256_cmpeq_epi8(some, bits));
        const __m256i low = load(32 * half);
        take(16 * half, _mm256_unpacklo_epi8(low, high));
        take(16 * half + 32, _mm256_unpackhi_epi8(low, high));
    }
}
#endif

// Decode the numbers of a block in order.
#ifdef __AVX2__
inline void join_bf13(const uint8_t* block, Bf16* to) {
    each_bf13(block, [&](int at, __m256i numbers) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), numbers);
    });
}
#else
inline void join_bf13(const uint8_t* block, Bf16* to) {
    const uint8_t *fours = block + kPackedBlock, *fifth = fours + kPackedBlock / 2;
    const Bytes16 kBits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) {
        const Bytes16 both = sixteen(fours + lane % 2 * 16), four = lane < 2 ? both & 15 : both >> 4;
        const uint8_t first = fifth[2 * lane], second = fifth[2 * lane + 1];
        const Bytes16 ones = {first,  first,  first,  first,  first,  first,  first,  first,
                              second, second, second, second, second, second, second, second};
        const auto one = static_cast<Bytes16>((ones & kBits) != 0); // all ones where the bit is set
        const Bytes16 upper = (four & 7) | (one & 8);
        const Bytes16 high = (static_cast<Bytes16>(upper != 0) & (upper + 48)) | (four & 8) << 4;
        const Words16 words = __builtin_convertvector(sixteen(block + lane * 16), Words16) |
                              __builtin_convertvector(high, Words16) << 8;
        Bf16 both_halves[16];
        std::memcpy(both_halves, &words, sizeof(both_halves));
        std::memcpy(to + lane * 8, both_halves, sizeof(both_halves) / 2);
        std::memcpy(to + 32 + lane * 8, both_halves + 8, sizeof(both_halves) / 2);
    }
}
#endif

} // namespace
} // namespace slipstream
