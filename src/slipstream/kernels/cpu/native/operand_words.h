// Rows in words, prepared for a packed matrix by instruction sets without byte products in int32: a single
// row, several rows by rows, or several rows in lanes.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT
inline void word_operand(const Matrix& m, Operand& x, char* scratch) {
    const int count = words_of(m);
    auto* words = reinterpret_cast<int16_t*>(scratch);
    x.words = words;
    x.stride = operand_stride(m.inputs);
    x.unit = split_words(x.rows.full, m, words, x.stride);
    auto* sums = reinterpret_cast<float*>(words + count * x.stride);
    x.sums = sums;
    if (is_int4(m))
        sum_words(words, x.stride, count, m.group, sums, operand_sums(m.inputs));
}
// Several rows in words, row by row: the first word of each number, followed by the second words.
inline void words_by_rows_operand(const Matrix& m, Operand& x, char* scratch) {
    const int64_t rows = x.rows.count, count = words_of(m), all = rows * count;
    auto* words = reinterpret_cast<int16_t*>(scratch);
    x.words = words;
    x.by_rows = true;
    x.stride = operand_stride(m.inputs);
    x.sums_stride = operand_sums(m.inputs);
    auto* sums = reinterpret_cast<float*>(words + all * x.stride);
    auto* units = sums + all * x.sums_stride;
    x.sums = sums;
    x.units = units;
    for (int64_t r = 0; r < rows; ++r)
        units[r] = split_words(x.rows.full + r * x.rows.stride, m, words + r * count * x.stride, x.stride);
    for (int64_t r = 0; is_int4(m) && r < all; ++r)
        sum_words(words + r * x.stride, x.stride, 1, m.group, sums + r * x.sums_stride, x.sums_stride);
}
// Several rows in lanes of words.
inline void word_lanes(const Matrix& m, Operand& x, char* scratch) {
    const WordLanes lanes(m, x.rows.count);
    auto* words = reinterpret_cast<int16_t*>(scratch);
    auto* units = reinterpret_cast<float*>(words + lanes.groups() * lanes.group);
    x.words = words;
    x.units = units;
    for (int64_t g = 0; g < lanes.groups(); ++g) {
        const int64_t r = g * kWordGroup;
        const bool is_wide = r < lanes.wide;
        const WordRows rows = {m, is_wide ? 1 : lanes.lanes, lanes.span, lanes.numbers};
        const int64_t count = is_wide ? least(kWordGroup, lanes.wide - r) : lanes.narrow;
        rows.fill(x.rows.full + r * x.rows.stride, x.rows.stride, count, words + g * lanes.group, units + r);
    }
}
#endif

} // namespace
} // namespace slipstream
