// Decoding of packed codes to rows of bfloat16 in memory, for products of many rows. Does what `decode` of
// formats.h does by way of float32, in a fifth of the instructions.
#pragma once

namespace slipstream {
namespace {

// Store the first n numbers. Not a loop: the compiler would turn it into one memory copy instruction, which
// takes 40 cycles to start (512 tokens times 1536 x 576 of int8 took 1.2 times as long as bfloat16).
template <int L>
[[gnu::always_inline]] inline void store_lanes(const Bf16Lanes (&v)[L], int64_t n, Bf16* to) {
#pragma GCC unroll 2
    for (int l = 0; l < L; ++l) {
        const int64_t left = n - 32 * l;
        if (left >= 32)
            v[l].store(to + 32 * l);
        else if (left > 0)
            _mm512_mask_storeu_epi16(to + 32 * l, static_cast<__mmask32>((uint64_t{1} << left) - 1), v[l].v);
    }
}

inline Bf16Lanes rounded_lanes(__m512 low, __m512 high) {
    return {(__m512i)_mm512_cvtne2ps_pbh(high, low)};
}

// Conversion of int8 codes by arithmetic, not by a table of seven bits: codes from other sources may be -128.
struct WideInt8 {
    explicit WideInt8(const Matrix&) {}
    static __m512 wide(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
    void load(const PackedRow& row, int64_t k, Bf16Lanes* to) const {
        const auto* codes = reinterpret_cast<const __m128i*>(row.codes + k);
        for (int i = 0; i < 2; ++i, codes += 2)
            to[i] = rounded_lanes(wide(_mm_loadu_si128(codes)), wide(_mm_loadu_si128(codes + 1)));
    }
    void load(const PackedRow& row, int64_t k, int64_t n, Bf16Lanes* to) const {
        alignas(64) uint8_t codes[kPackedBlock] = {};
        std::memcpy(codes, row.codes + k, static_cast<size_t>(n));
        load({codes, nullptr, nullptr, nullptr}, 0, to);
    }
};

template <class F>
inline void decode_bytes(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, Bf16* out,
                         int64_t stride) {
    const F codes(m);
    const PackedRows all(m);
    for (int64_t i = 0; i < rows; ++i) {
        const PackedRow row = all.row(o + i);
        for (int64_t b = 0; b < n; b += kPackedBlock) {
            const int64_t count = least(kPackedBlock, n - b);
            Bf16Lanes lanes[2];
            if (count == kPackedBlock)
                codes.load(row, k + b, lanes);
            else
                codes.load(row, k + b, count, lanes);
            store_lanes(lanes, count, out + i * stride + b);
        }
    }
}

// Decode int4: the scales and minima of up to sixteen groups are converted to float32 at a time.
inline void decode_nibbles(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, Bf16* out,
                           int64_t stride) {
    constexpr int64_t kAtOnce = 16 * 32;
    const int shift = m.group == 32 ? 5 : (m.group == 64 ? 6 : 7);
    const __m128i four = _mm_set1_epi8(15);
    const PackedRows all(m);
    alignas(64) float scales[16], minima[16];
    for (int64_t i = 0; i < rows; ++i) {
        const PackedRow row = all.row(o + i);
        for (int64_t b = 0; b < n; b += kAtOnce) {
            const int64_t from = k + b, count = least(kAtOnce, n - b), first = from >> shift;
            const int64_t groups = ((from + count - 1) >> shift) + 1 - first;
            const Vec scale = Vec::load(row.scales + first, groups);
            scale.store(scales);
            (row.minima ? Vec::load(row.minima + first, groups) : scale * Vec::set(-8)).store(minima);
            for (int64_t j = 0; j < count; j += 32) {
                const auto* codes = reinterpret_cast<const __m128i*>(row.codes + (from + j) / 2);
                const __m128i bytes = _mm_loadu_si128(codes);
                const __m128i low = _mm_and_si128(bytes, four);
                const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
                const int64_t group = ((from + j) >> shift) - first;
                const __m512 times = _mm512_set1_ps(scales[group]), least_one = _mm512_set1_ps(minima[group]);
                const auto weights = [&](__m128i code) {
                    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(code)), times, least_one);
                };
                const Bf16Lanes lanes[1] = {rounded_lanes(weights(low), weights(high))};
                store_lanes(lanes, least(32, count - j), out + i * stride + b + j);
            }
        }
    }
}

// The magnitudes of the fp6 codes without their sign.
struct Magnitudes {
    alignas(64) float values[32] = {};
};
constexpr Magnitudes magnitudes(int mantissa, int bias) {
    Magnitudes t;
    for (int c = 0; c < 32; ++c) {
        const int m = c & ((1 << mantissa) - 1), e = c >> mantissa, place = (e ? e : 1) - bias - mantissa;
        const auto whole = static_cast<float>(e ? m + (1 << mantissa) : m);
        t.values[c] =
            place < 0 ? whole / static_cast<float>(1 << -place) : whole * static_cast<float>(1 << place);
    }
    return t;
}
constexpr Magnitudes kE2m3Magnitudes = magnitudes(3, 1), kE3m2Magnitudes = magnitudes(2, 3);

// Decode fp6: the rounded products of all magnitudes with the scale of a group form one lookup table.
inline void decode_sixes(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, Bf16* out,
                         int64_t stride) {
    const Magnitudes& t = m.format == kFp6E2m3 ? kE2m3Magnitudes : kE3m2Magnitudes;
    const Vec low = Vec::load(t.values), high = Vec::load(t.values + 16);
    const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000));
    const PackedRows all(m);
    for (int64_t i = 0; i < rows; ++i) {
        const PackedRow row = all.row(o + i);
        for (int64_t b = 0; b < n; b += kPackedBlock) {
            const int64_t from = k + b;
            const Vec scale = everywhere(row.scales + from / kPackedBlock);
            const __m512i table = rounded_lanes((low * scale).v, (high * scale).v).v;
            const __m512i codes = Sixes::plain(row.codes + from / 2, row.crumbs + from / 4).v;
            const auto weights = [&](__m256i some) {
                const __m512i wide = _mm512_cvtepu8_epi16(some), size = _mm512_permutexvar_epi16(wide, table);
                // 0xf8: size | (bits & sign)
                return Bf16Lanes{_mm512_ternarylogic_epi32(size, _mm512_slli_epi16(wide, 10), sign, 0xf8)};
            };
            const Bf16Lanes lanes[2] = {weights(_mm512_castsi512_si256(codes)),
                                        weights(_mm512_extracti64x4_epi64(codes, 1))};
            store_lanes(lanes, least(kPackedBlock, n - b), out + i * stride + b);
        }
    }
}

inline void decode(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, Bf16* out,
                   int64_t stride) {
    switch (m.format) {
    case kInt8:
        return decode_bytes<WideInt8>(m, o, rows, k, n, out, stride);
    case kFp8:
        return decode_bytes<Fp8Codes>(m, o, rows, k, n, out, stride);
    case kBf13:
        return decode_bytes<Bf13Codes>(m, o, rows, k, n, out, stride);
    case kInt4:
    case kInt4Symmetric:
        return decode_nibbles(m, o, rows, k, n, out, stride);
    default:
        return decode_sixes(m, o, rows, k, n, out, stride);
    }
}

} // namespace
} // namespace slipstream
