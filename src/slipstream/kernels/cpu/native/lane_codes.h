// Integer codes as bytes to be multiplied with rows in lanes (digits.h), and their scales.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// The distance between consecutive blocks of 64 codes of a row, for vectors; tiles have those of sixteen rows
// together. Both read some inputs of several rows, so prefetching along a row would be too late: the next
// rows are prefetched instead, see lanes_bytes.h and lanes_byte_tiles.h.
constexpr int64_t kInRows = 64;

// Unpacks int8 codes: inputs [k, k + n) of a row, with `apart` bytes between blocks of 64; `k` is a multiple
// of kBytesDeep. Tiles take the codes as they are; for vectors they are made unsigned by adding 128.
struct BytesOfInt8 {
    static constexpr float kUnit = Int8Bytes::kUnit;
    static constexpr bool kScales = false;
    static constexpr int64_t kCodesOfByte = 1;
    static void bring(const PackedRow& row, int64_t k, int64_t n, uint8_t* to, int64_t apart) {
        for (int64_t b = 0; b < n; b += 64, to += apart) {
            const uint8_t* from = row.codes + k + b;
            const Codes some = n - b < 64 ? Codes::load(from, n - b) : Codes::load(from);
            (kByTiles ? some : less_least(some)).store(to);
        }
    }
};

// Unpacks int4 codes to bytes in the same order; a byte is 8 more than the code's signed value.
struct BytesOfInt4 {
    static constexpr int kAdded = 8;
    static constexpr float kUnit = 1;
    static constexpr bool kScales = true;
    static constexpr int64_t kCodesOfByte = 2;
    static void bring(const PackedRow& row, int64_t k, int64_t n, uint8_t* to, int64_t apart) {
        const uint8_t* from = row.codes + k / 2;
        for (int64_t left = ceil_div(n, 32) * 16; left > 0; left -= 64, from += 64, to += 2 * apart) {
            const Nibbles both(left < 64 ? Codes::load(from, left) : Codes::load(from));
            both.store(to, apart);
        }
    }
};

// Unpacks fp6 codes to eighths in the same order; a byte is 64 more than the value.
struct BytesOfSixes {
    static constexpr int kAdded = Fp6Bytes::kAdded;
    static constexpr float kUnit = Fp6Bytes::kUnit;
    static constexpr bool kScales = true;
    static constexpr int64_t kCodesOfByte = 2;
    static void bring(const PackedRow& row, int64_t k, int64_t n, uint8_t* to, int64_t apart) {
        for (int64_t b = k; b < k + n; b += 64, to += apart) {
            Fp6Bytes::of(Sixes::plain(row.codes + b / 2, row.crumbs + b / 4)).store(to);
        }
    }
};

// The scales of inputs [k, k + n), and the value of the code 0, which is multiplied with sums of inputs; see
// added_in_lanes.
template <class F>
inline void bring_scales(const Matrix& m, const PackedRow& row, int64_t k, int64_t n, float* scales,
                         float* middles) {
    const int64_t first = k / m.group, count = ceil_div(n, m.group);
    const Vec scale = Vec::load(row.scales + first, count);
    scale.store(scales);
    if (row.minima)
        fma(scale, Vec::set(kByTiles ? 0 : F::kAdded), Vec::load(row.minima + first, count)).store(middles);
}

#endif

} // namespace
} // namespace slipstream
