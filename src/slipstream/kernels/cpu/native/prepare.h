// Selects the form (operand.h, operand_words.h) of the left side of a product.
#pragma once

namespace slipstream {
namespace {

// Parts a row, see Operand::parted.
inline void part_row(const float* x, int64_t inputs, float* to) {
    constexpr int64_t kHalf = Vec::kWidth, kWhole = 2 * kHalf;
    int64_t j = 0;
    for (; j + kWhole <= inputs; j += kWhole)
        for (int64_t i = 0; i < kHalf; ++i) {
            to[j + i] = x[j + 2 * i];
            to[j + kHalf + i] = x[j + 2 * i + 1];
        }
    if (j == inputs)
        return;
    float rest[kWhole] = {};
    std::memcpy(rest, x + j, static_cast<size_t>(inputs - j) * sizeof(float));
    part_row(rest, kWhole, to + j);
}

// Prepares rows for a matrix. `scratch` has operand_bytes bytes, is aligned to 64 bytes, and is in use by the
// calling thread until it has multiplied.
inline Operand prepare(const Rows& rows, const Matrix& m, char* scratch) {
    Operand x = {rows};
    if (takes_parted(m, rows.count)) {
        auto* parted = reinterpret_cast<float*>(scratch);
        part_row(rows.full, m.inputs, parted);
        x.parted = parted;
        return x;
    }
#ifndef SLIPSTREAM_BF16_DOT
    if (rows.count == 1 && takes_words(m)) {
        word_operand(m, x, scratch);
        return x;
    }
#ifdef SLIPSTREAM_FLOATS_OF_BYTES
    if (in_floats(m) && rows.count <= kFewRows) {
        auto* floats = reinterpret_cast<float*>(scratch);
        x.floats = floats;
        x.stride = operand_stride(m.inputs);
        float_rows(rows.full, rows.stride, rows.count, m, floats, x.stride);
        return x;
    }
#endif
    if (in_words_by_rows(m, rows.count)) {
        words_by_rows_operand(m, x, scratch);
        return x;
    }
    if (rows.count >= fewest_in_words(m) && rows.count <= kFewRows) {
        word_lanes(m, x, scratch);
        return x;
    }
#endif
    if (m.input_bits && (in_codes(m) || !Vec::kBf16Dot))
        return rounded_operand(rows, m, scratch);
#ifdef SLIPSTREAM_BF16_DOT
    const int64_t in_lanes = dense_in_lanes(rows.count);
    if (rows.rounded && in_lanes && fits_lanes(m, rows.count)) {
        x.in_lanes = in_lanes;
        x.lanes = reinterpret_cast<Bf16*>(scratch);
        lay_in_lanes(rows.rounded, rows.stride, in_lanes, m.inputs, reinterpret_cast<Bf16*>(scratch));
    }
    if (!wants_operand(m, rows.count))
        return x;
    if (m.input_bits)
        scratch = whole_rows(rows, m, x, scratch);
    if (rows.count == 1 && takes_digits(m))
        digit_operand(m, x, scratch);
    else if (in_bytes(m))
        scratch = byte_lanes(x.rows, m, x, scratch);
    if (!x.digits && x.in_lanes < rows.count)
        packed_terms(x.rows, m, x.in_lanes, x, scratch);
#endif
    return x;
}

} // namespace
} // namespace slipstream
