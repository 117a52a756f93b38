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
constexpr int64_t kAhead = 6 << 10;
// The same of packed weights of which several rows are read at once.
constexpr int64_t kPackedAhead = 12 << 10;

// The multiplier of each row of a packed matrix, to be applied to the finished sum; null where dense.
inline const float* row_factors(const Matrix& m) {
    return static_cast<const float*>(m.planes[kFactors]);
}

// Whether codes are whole numbers of something, which products of bytes take.
inline bool in_bytes(const Matrix& m) {
    return m.format != kFp8 && m.format != kFp6E3m2;
}

// A row of the planes.
struct PackedRow {
    const uint8_t *codes, *crumbs; // a code's lower bits (or all), and the upper two of fp6
    const Half *scales, *minima;   // null where the format has none, as are the upper bits
};

// Where rows lie: what takes divisions to know is found out once, for they would take longer than a block.
class PackedRows {
public:
    explicit PackedRows(const Matrix& m)
        : first_({static_cast<const uint8_t*>(m.planes[kCodes]), nullptr, nullptr, nullptr}),
          code_bytes_(m.inputs) {
        if (m.format == kInt8 || m.format == kFp8)
            return;
        groups_ = ceil_div(m.inputs, m.group);
        code_bytes_ = groups_ * m.group / 2;
        first_.crumbs = static_cast<const uint8_t*>(m.planes[kUpper]);
        first_.scales = static_cast<const Half*>(m.planes[kScales]);
        first_.minima = static_cast<const Half*>(m.planes[kMinima]);
    }
    PackedRow row(int64_t o) const {
        return {first_.codes + o * code_bytes_,
                first_.crumbs ? first_.crumbs + o * (code_bytes_ / 2) : nullptr,
                first_.scales ? first_.scales + o * groups_ : nullptr,
                first_.minima ? first_.minima + o * groups_ : nullptr};
    }

private:
    PackedRow first_;
    int64_t code_bytes_, groups_ = 0;
};

// Read where it lies: a copy on the stack would be read as a vector before it is written.
inline float widen_one(const Half* x) {
    return Vec::load(x, 1).sum();
}

// Sixteen bytes at a time, which the compiler's own vectors are on any machine: byte by byte it cannot know
// that nothing overlaps, and what is written in smaller parts is slow to read as a whole.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

inline Bytes16 sixteen(const uint8_t* from) {
    Bytes16 bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return bytes;
}

// 32 codes of four bits.
inline void nibbles(const uint8_t* from, uint8_t* to) {
    const Bytes16 bytes = sixteen(from), low = bytes & 15, high = bytes >> 4;
    std::memcpy(to, &low, sizeof(low));
    std::memcpy(to + 16, &high, sizeof(high));
}

// The upper two bits of 64 codes of six, whose lower four are there.
inline void add_crumbs(const uint8_t* from, uint8_t* codes) {
    const Bytes16 crumbs = sixteen(from);
    for (int j = 0; j < 4; ++j) {
        const Bytes16 all = sixteen(codes + 16 * j) | (crumbs >> 2 * j & 3) << 4;
        std::memcpy(codes + 16 * j, &all, sizeof(all));
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

// n <= kPackedBlock weights into `out`, which has room for a whole block: those of a whole row from
// input `from` on, a multiple of kPackedBlock. A group has 1 << group_shift inputs.
inline void decode_block(const Matrix& m, const PackedRow& row, int group_shift, int64_t from, int64_t n,
                         float* out) {
    const uint8_t* halves = row.codes + from / 2;
    uint8_t codes[kPackedBlock];
    switch (m.format) {
    case kInt8:
        for (int64_t j = 0; j < n; ++j)
            out[j] = static_cast<float>(static_cast<int8_t>(row.codes[from + j]));
        return;
    case kFp8:
        minifloats(row.codes + from, n, 7, 7, 256.0f, out);
        return;
    case kInt4:
    case kInt4Symmetric:
        for (int64_t b = 0; b < n; b += 32) {
            nibbles(halves + b / 2, codes);
            const int64_t group = (from + b) >> group_shift;
            const float scale = widen_one(row.scales + group);
            const float minimum = row.minima ? widen_one(row.minima + group) : -8.0f * scale;
            for (int j = 0; j < 32; j += Vec::kWidth) {
                const Vec code = Vec::load(reinterpret_cast<const int8_t*>(codes) + j);
                fma(code, Vec::set(scale), Vec::set(minimum)).store(out + b + j);
            }
        }
        return;
    default:
        nibbles(halves, codes);
        nibbles(halves + 16, codes + 32);
        add_crumbs(row.crumbs + from / 4, codes);
        const float scale = widen_one(row.scales + (from >> group_shift)); // a code times it is exact
        if (m.format == kFp6E2m3)
            minifloats(codes, 64, 5, 7, 16384.0f * scale, out);
        else
            minifloats(codes, 64, 5, 8, 4096.0f * scale, out);
    }
}

// Weights before the multiplier of their row: out[i * stride + j] = weight (o + i, k + j), for `rows` rows
// and `n` inputs of a packed matrix. k is a multiple of kPackedBlock; exactly n numbers of each row are
// written. To is float or Bf16; the codes of formats without groups are exact in both.
template <class To>
inline void decode(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, To* out, int64_t stride) {
    alignas(64) float block[kPackedBlock];
    const int group_shift = m.group == 32 ? 5 : (m.group == 64 ? 6 : 7);
    const PackedRows all(m);
    for (int64_t i = 0; i < rows; ++i) {
        const PackedRow row = all.row(o + i);
        for (int64_t b = 0; b < n; b += kPackedBlock) {
            const int64_t count = least(kPackedBlock, n - b);
            decode_block(m, row, group_shift, k + b, count, block);
            To* to = out + i * stride + b;
            int64_t j = 0;
            for (; j + Vec::kWidth <= count; j += Vec::kWidth) // parts of a vector are slow but with AVX-512
                Vec::load(block + j).store(to + j);
            if (j < count)
                Vec::load(block + j, count - j).store(to + j, count - j);
        }
    }
}

} // namespace
} // namespace slipstream
