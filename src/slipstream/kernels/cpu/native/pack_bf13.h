// Packs rows to bf13, with the same result as formats/bf13.py.
#pragma once

namespace slipstream {
namespace {

// Rounds a row to bfloat16 and divides it by a power of two such that its largest magnitude lies in [1, 2);
// writes the bits, with zeros beyond the row. Returns the exponent of that power. See formats/bf13.py:
// `_normal`.
inline int normal_row(const float* x, int64_t n, int64_t padded, Bf16* row) {
    constexpr int kOne = 127, kLeast = 98;
    std::memset(static_cast<void*>(row + n), 0, static_cast<size_t>(padded - n) * sizeof(*row));
    over(x, 0, n,
         [&](Vec v, int64_t j) { j + Vec::kWidth <= n ? v.store(row + j) : v.store(row + j, n - j); });
    int largest = 0;
    for (int64_t j = 0; j < n; ++j) {
        const int exponent = row[j].bits >> 7 & 0xff;
        largest = exponent > largest ? exponent : largest;
    }
    const bool zeros = largest < kOne - kLeast + 2;
    const int shift = zeros ? 0 : largest - kOne, least_one = zeros ? 256 : kLeast;
    for (int64_t j = 0; j < n; ++j) {
        const int bits = row[j].bits, exponent = (bits >> 7 & 0xff) - shift;
        const int nearest = exponent == least_one - 1 ? kLeast << 7 : 0;
        const int found = exponent >= least_one ? (bits & 0x7fff) - shift * 128 : nearest;
        row[j].bits = static_cast<uint16_t>(found | (bits & 0x8000));
    }
    return shift;
}

// Packs one row; `x` has room for the row and its bits.
inline void pack_bf13(const PackCall& call, int64_t r, float* x) {
    const Matrix& m = call.packed;
    const int64_t padded = ceil_div(m.inputs, kPackedBlock) * kPackedBlock;
    auto* codes = static_cast<uint8_t*>(const_cast<void*>(m.planes[kCodes])) + r * bf13_at(padded);
    auto* row = reinterpret_cast<Bf16*>(x + ceil_div(m.inputs, 16) * 16);
    read_row(call, r, x);
    const int shift = normal_row(x, m.inputs, padded, row);
    static_cast<float*>(const_cast<void*>(m.planes[kFactors]))[r] = std::ldexp(1.0f, shift);
    for (int64_t k = 0; k < padded; k += kPackedBlock, codes += kBf13Bytes) {
        uint8_t four[kPackedBlock], fifth[kPackedBlock];
        for (int64_t j = 0; j < kPackedBlock; ++j) {
            const int bits = row[k + j / 16 * 8 + j % 16 / 8 * 32 + j % 8].bits, high = bits >> 8 & 0x7f;
            const int upper = high ? high - 48 : 0;
            codes[j] = static_cast<uint8_t>(bits);
            four[j] = static_cast<uint8_t>((upper & 7) | (bits >> 12 & 8));
            fifth[j] = static_cast<uint8_t>(upper >> 3);
        }
        uint8_t* to = codes + kPackedBlock;
        for (int64_t j = 0; j < kPackedBlock / 2; ++j)
            *to++ = static_cast<uint8_t>(four[j] | four[j + 32] << 4);
        for (int64_t j = 0; j < kPackedBlock; j += 8) {
            int all = 0;
            for (int64_t b = 0; b < 8; ++b)
                all |= fifth[j + b] << b;
            *to++ = static_cast<uint8_t>(all);
        }
    }
}

} // namespace
} // namespace slipstream
