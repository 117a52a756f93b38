// Decoders of packed weights: the one place that knows what their bytes stand for. Few rows and many rows
// (panels of a blocked product) are multiplied by what `decode` makes of them.
//
// Source: the docstrings of formats/int8.py, int4.py, fp8.py and fp6.py, which draw the bytes.
#pragma once

namespace slipstream {
namespace {

// Inputs that are decoded at a time: one block of fp6, two of int4.
constexpr int64_t kPackedBlock = 64;

// How far ahead of their use weights are asked for where they are read as they lie, one row after another.
constexpr int64_t kAhead = 4 << 10;
// The same of packed weights of which several rows are read at once.
constexpr int64_t kPackedAhead = 12 << 10;

// The multiplier of each row of a packed matrix, to be applied to the finished sum; null where dense.
inline const float* row_factors(const Matrix& m) {
    return static_cast<const float*>(m.planes[kFactors]);
}

// A row of the planes from input k on.
struct PackedRow {
    PackedRow(const Matrix& m, int64_t o, int64_t k) {
        const auto* codes_plane = static_cast<const uint8_t*>(m.planes[kCodes]);
        codes = codes_plane + o * m.inputs + k;
        if (m.format == kInt8 || m.format == kFp8)
            return;
        const int64_t group = m.group ? m.group : kPackedBlock, groups = ceil_div(m.inputs, group);
        codes = codes_plane + (o * groups * group + k) / 2;
        crumbs = static_cast<const uint8_t*>(m.planes[kScales]) + (o * groups * group + k) / 4;
        scales = static_cast<const Half*>(m.planes[kScales]) + o * groups + k / group;
        if (m.format == kInt4)
            minima = static_cast<const Half*>(m.planes[kMinima]) + o * groups + k / group;
    }
    const uint8_t *codes, *crumbs = nullptr; // a code's lower bits (or all), and the upper two of fp6
    const Half *scales = nullptr, *minima = nullptr;
};

inline float widen_one(Half x) {
    return Vec::load(&x, 1).sum();
}

// 32 codes of four bits.
inline void nibbles(const uint8_t* from, uint8_t* to) {
    for (int j = 0; j < 16; ++j) {
        to[j] = from[j] & 15;
        to[j + 16] = static_cast<uint8_t>(from[j] >> 4);
    }
}

// Small floats by way of float16, whose fields are the same but wider; `bits` of exponent and mantissa, and
// `shift` to the float16's mantissa. What comes out is 2^(bias - 15) of the value.
inline void minifloats(const uint8_t* codes, int64_t n, int bits, int shift, float factor, float* out) {
    Half halves[kPackedBlock] = {};
    const int magnitude = (1 << bits) - 1;
    for (int64_t j = 0; j < n; ++j)
        halves[j].bits = static_cast<uint16_t>((codes[j] & magnitude) << shift | (codes[j] >> bits) << 15);
    for (int64_t j = 0; j < n; j += Vec::kWidth)
        (Vec::load(halves + j) * Vec::set(factor)).store(out + j);
}

// n <= kPackedBlock weights of a row from input k on into `out`, which has room for a whole block. k is a
// multiple of kPackedBlock.
inline void decode_block(const Matrix& m, int64_t o, int64_t k, int64_t n, float* out) {
    const PackedRow row(m, o, k);
    uint8_t codes[kPackedBlock];
    switch (m.format) {
    case kInt8:
        for (int64_t j = 0; j < n; ++j)
            out[j] = static_cast<float>(static_cast<int8_t>(row.codes[j]));
        return;
    case kFp8:
        minifloats(row.codes, n, 7, 7, 256.0f, out);
        return;
    case kInt4:
    case kInt4Symmetric:
        for (int64_t b = 0; b < n; b += 32) {
            nibbles(row.codes + b / 2, codes);
            const int64_t group = b / m.group;
            const float scale = widen_one(row.scales[group]);
            const float minimum = row.minima ? widen_one(row.minima[group]) : -8.0f * scale;
            for (int j = 0; j < 32; ++j)
                out[b + j] = static_cast<float>(codes[j]) * scale + minimum;
        }
        return;
    default:
        nibbles(row.codes, codes);
        nibbles(row.codes + 16, codes + 32);
        for (int j = 0; j < 64; ++j)
            codes[j] = static_cast<uint8_t>(codes[j] | ((row.crumbs[j % 16] >> (j / 16 * 2)) & 3) << 4);
        if (m.format == kFp6E2m3)
            minifloats(codes, 64, 5, 7, 16384.0f, out);
        else
            minifloats(codes, 64, 5, 8, 4096.0f, out);
    }
}

// Weights before the multiplier of their row: out[i * stride + j] = weight (o + i, k + j), for `rows` rows
// and `n` inputs of a packed matrix. k is a multiple of kPackedBlock; exactly n numbers of each row are
// written. To is float or Bf16; the codes of all formats but int4 are exact in both.
template <class To>
inline void decode(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, To* out, int64_t stride) {
    alignas(64) float block[kPackedBlock];
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t b = 0; b < n; b += kPackedBlock) {
            const int64_t count = least(kPackedBlock, n - b);
            decode_block(m, o + i, k + b, count, block);
            for (int64_t j = 0; j < count; j += Vec::kWidth)
                Vec::load(block + j, least(count - j, Vec::kWidth))
                    .store(out + i * stride + b + j, least(count - j, Vec::kWidth));
        }
}

} // namespace
} // namespace slipstream
