// Decoders of packed weights: the only place that knows the meaning of their bytes. Products of few rows and
// of many rows (panels of a blocked product) both use what `decode` produces.
//
// Source: the docstrings of formats/int8.py, int4.py, fp8.py, fp6.py and bf13.py, which show the byte
// layouts.
#pragma once

namespace slipstream {
namespace {

// Prefetch distance in bytes for weights that are read in memory order, one row after another.
constexpr int64_t kAhead = 6 << 10;
// Prefetch distance in bytes for packed weights of which several rows are read at once.
constexpr int64_t kPackedAhead = 12 << 10;

// The factor of each row of a packed matrix, applied to the finished sum; null if the matrix is dense.
inline const float* row_factors(const Matrix& m) {
    return static_cast<const float*>(m.planes[kFactors]);
}

// Whether the codes are integer multiples of a unit, so that integer byte products apply.
inline bool in_bytes(const Matrix& m) {
    return m.format != kFp8 && m.format != kFp6E3m2 && m.format != kBf13;
}

// Pointers to one row in each plane.
struct PackedRow {
    const uint8_t *codes, *crumbs; // the lower bits (or all bits) of a code, and for fp6 the upper two
    const Half *scales, *minima;   // null where the format has none; so is `crumbs`
};

// Locates rows in the planes. The divisions are done once: they take longer than decoding a block of a row.
class PackedRows {
public:
    explicit PackedRows(const Matrix& m)
        : first_({static_cast<const uint8_t*>(m.planes[kCodes]), nullptr, nullptr, nullptr}),
          code_bytes_(m.inputs) {
        if (m.format == kInt8 || m.format == kFp8)
            return;
        groups_ = ceil_div(m.inputs, m.group);
        code_bytes_ = m.format == kBf13 ? groups_ * kBf13Bytes : groups_ * m.group / 2;
        first_.crumbs = static_cast<const uint8_t*>(m.planes[kUpper]);
        first_.scales = static_cast<const Half*>(m.planes[kScales]);
        first_.minima = static_cast<const Half*>(m.planes[kMinima]);
    }
    [[gnu::always_inline]] PackedRow row(int64_t o) const {
        return {first_.codes + o * code_bytes_,
                first_.crumbs ? first_.crumbs + o * (code_bytes_ / 2) : nullptr,
                first_.scales ? first_.scales + o * groups_ : nullptr,
                first_.minima ? first_.minima + o * groups_ : nullptr};
    }

private:
    PackedRow first_;
    int64_t code_bytes_, groups_ = 0;
};

inline float widen_one(const Half* x) {
#ifdef __F16C__
    return _cvtsh_ss(x->bits);
#else // load in place: a copy on the stack would be loaded as a vector before its store has completed
    return Vec::load(x, 1).sum();
#endif
}

// Convert sixteen minifloats by way of float16, whose fields have the same order but are wider: kBits is the
// number of exponent and mantissa bits, kShift the shift to float16's mantissa. The results are 2^(bias - 15)
// of the values, times `factor`.
template <int kBits, int kShift, class F>
inline void minifloats(Bytes16 codes, Vec factor, F take) {
    const Words16 wide = __builtin_convertvector(codes, Words16);
    constexpr uint16_t kMagnitude = (1 << kBits) - 1;
    const Words16 bits = (wide & kMagnitude) << kShift | (wide >> kBits) << 15;
    alignas(32) Half halves[16];
    std::memcpy(halves, &bits, sizeof(halves));
#pragma GCC unroll 16
    for (int j = 0; j < 16; j += Vec::kWidth)
        take(j, Vec::load(halves + j) * factor);
}

// Call take(j, weights j to j + Vec::kWidth) for the weights of one block, before the row's factor is
// applied: the weights of `row` from input `from` on, a multiple of kPackedBlock. There are `n` of them,
// which is kPackedBlock if `kWhole`; values passed beyond `n` are undefined. A group has 1 << group_shift
// inputs.
template <bool kWhole, class F>
[[gnu::always_inline]] inline void decode_block(const Matrix& m, const PackedRow& row, int group_shift,
                                                int64_t from, int64_t n, F take) {
    const uint8_t *bytes = row.codes + from, *halves = row.codes + from / 2;
    alignas(16) uint8_t end[kPackedBlock] = {};
    if (!kWhole && (m.format == kInt8 || m.format == kFp8)) {
        std::memcpy(end, bytes, static_cast<size_t>(n));
        bytes = end;
    }
    const auto sixteen_at = [&](int at) { return [&take, at](int j, Vec w) { take(at + j, w); }; };
    switch (m.format) {
    case kInt8:
#pragma GCC unroll 16
        for (int j = 0; j < kPackedBlock; j += Vec::kWidth)
            take(j, Vec::load(reinterpret_cast<const int8_t*>(bytes) + j));
        return;
    case kFp8:
#ifdef SLIPSTREAM_FLOATS_OF_BYTES
        each_fp8(bytes, [&](int j, Vec w) { take(j, w * Vec::set(kFp8Unit)); });
        return;
#endif
#pragma GCC unroll 4
        for (int j = 0; j < kPackedBlock; j += 16)
            minifloats<7, 7>(sixteen(bytes + j), Vec::set(256), sixteen_at(j));
        return;
    case kInt4:
    case kInt4Symmetric:
#pragma GCC unroll 2
        for (int b = 0; b < kPackedBlock; b += 32) {
            if (!kWhole && b >= n)
                return;
            const int64_t group = (from + b) >> group_shift;
            const Vec scale = Vec::set(widen_one(row.scales + group));
            const Vec minimum = row.minima ? Vec::set(widen_one(row.minima + group)) : scale * Vec::set(-8);
            alignas(16) int8_t codes[32];
            const Bytes16 both = sixteen(halves + b / 2), low = both & 15, high = both >> 4;
            std::memcpy(codes, &low, sizeof(low));
            std::memcpy(codes + 16, &high, sizeof(high));
#pragma GCC unroll 8
            for (int j = 0; j < 32; j += Vec::kWidth)
                take(b + j, fma(Vec::load(codes + j), scale, minimum));
        }
        return;
    case kBf13:
        alignas(64) Bf16 numbers[kPackedBlock];
        join_bf13(row.codes + bf13_at(from), numbers);
#pragma GCC unroll 16
        for (int j = 0; j < kPackedBlock; j += Vec::kWidth)
            take(j, Vec::load(numbers + j));
        return;
    default:
        // The product of a scale and a code is exact.
        const Vec scale = Vec::set(widen_one(row.scales + (from >> group_shift)));
        const Bytes16 crumbs = sixteen(row.crumbs + from / 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // sixteen codes each
            const Bytes16 both = sixteen(halves + i / 2 * 16);
            const Bytes16 code = (i % 2 ? both >> 4 : both & 15) | (crumbs >> 2 * i & 3) << 4;
            if (m.format == kFp6E2m3)
                minifloats<5, 7>(code, scale * Vec::set(16384), sixteen_at(16 * i));
            else
                minifloats<5, 8>(code, scale * Vec::set(4096), sixteen_at(16 * i));
        }
    }
}

// Return the shift s such that a group has 1 << s inputs.
inline int group_shift(const Matrix& m) {
    return m.group == 32 ? 5 : (m.group == 64 ? 6 : 7);
}

// Prefetch a later block of the row.
inline void ask_ahead(const Matrix& m, const PackedRow& row, int64_t from) {
    if (m.format == kInt8 || m.format == kFp8)
        prefetch(row.codes + from + kPackedAhead);
    else if (m.format == kBf13)
        ask_bf13(row.codes + bf13_at(from), kPackedAhead);
    else if (from % (2 * kPackedBlock) == 0)
        prefetch(row.codes + from / 2 + kPackedAhead);
}

// Decode weights, before the row's factor is applied: out[i * stride + j] = weight (o + i, k + j) for `rows`
// rows and `n` inputs of a packed matrix. k is a multiple of kPackedBlock; exactly n numbers of each row are
// written. To is float or Bf16; codes of formats without groups are exact in both.
template <class To>
inline void decode(const Matrix& m, int64_t o, int64_t rows, int64_t k, int64_t n, To* out, int64_t stride) {
    const int shift = group_shift(m);
    const PackedRows all(m);
    for (int64_t i = 0; i < rows; ++i) {
        const PackedRow row = all.row(o + i);
        To* to = out + i * stride;
        int64_t b = 0;
        for (; b + kPackedBlock <= n; b += kPackedBlock) {
            ask_ahead(m, row, k + b);
            decode_block<true>(m, row, shift, k + b, kPackedBlock,
                               [&](int j, Vec w) { w.store(to + b + j); });
        }
        if (b < n)
            decode_block<false>(m, row, shift, k + b, n - b, [&](int j, Vec w) {
                if (b + j + Vec::kWidth <= n) // partial stores are slow except with AVX-512
                    w.store(to + b + j);
                else if (b + j < n)
                    w.store(to + b + j, n - b - j);
            });
    }
}

// out[o - begin] = x . row o of a packed matrix, before the row's factor is applied; weights are multiplied
// as they are decoded.
inline void multiply_decoded(const float* x, const Matrix& m, int64_t begin, int64_t end, float* out) {
    const int shift = group_shift(m);
    const PackedRows all(m);
    for (int64_t o = begin; o < end; ++o) {
        const PackedRow row = all.row(o);
        Vec sums[4] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};
        const auto add = [&](int j, Vec w, Vec some) {
            Vec& sum = sums[j / Vec::kWidth % 4];
            sum = fma(w, some, sum);
        };
        int64_t k = 0;
        for (; k + kPackedBlock <= m.inputs; k += kPackedBlock) {
            ask_ahead(m, row, k);
            decode_block<true>(m, row, shift, k, kPackedBlock,
                               [&](int j, Vec w) { add(j, w, Vec::load(x + k + j)); });
        }
        if (k < m.inputs)
            decode_block<false>(m, row, shift, k, m.inputs - k, [&](int j, Vec w) {
                const int64_t left = m.inputs - k - j;
                if (left > 0)
                    add(j, w, left < Vec::kWidth ? Vec::load(x + k + j, left) : Vec::load(x + k + j));
            });
        out[o - begin] = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
    }
}

} // namespace
} // namespace slipstream
