// Products of input rows rounded to bytes with int8 weight rows, both in memory order; int32 sums are exact
// up to 65,536 inputs.
//
// With x = (code - zero) * scale, a product is scale * (code . w - zero * sum(w)); the sum of w is computed
// along with the products.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// Return the sum of n int8 codes.
inline int32_t sum_codes(const uint8_t* w, int64_t n) {
    Vec sum = Vec::set(0);
    for (int64_t k = 0; k < n; k += 64)
        sum = dot(sum, Codes::set(1), Codes::load(w + k, least(64, n - k)));
    return sum_of_integers(sum);
}

// out[i * os + c] = x row r + i . w row c, for R rows and C columns held in registers.
template <int R, int C>
inline void codes_block(const Operand& x, int64_t r, const uint8_t* w, int64_t n, float* out, int64_t os) {
    const uint8_t* codes = x.codes + r * x.stride;
    Vec sums[R][C], totals[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
        totals[c] = Vec::set(0);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i)
            sums[i][c] = Vec::set(0);
    }
    const auto step = [&](int64_t k, const Codes(&columns)[C]) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            totals[c] = dot(totals[c], Codes::set(1), columns[c]);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const Codes row = Codes::load(codes + i * x.stride + k);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                sums[i][c] = dot(sums[i][c], row, columns[c]);
        }
    };
    int64_t k = 0;
    Codes columns[C];
    for (; k + 64 <= n; k += 64) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            columns[c] = Codes::load(w + c * n + k);
            prefetch(w + c * n + k + kPackedAhead);
        }
        step(k, columns);
    }
    if (k < n) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            columns[c] = Codes::load(w + c * n + k, n - k);
        step(k, columns);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        const Grid& grid = x.grids[r + i];
        const Vec zero = integers(static_cast<int32_t>(grid.zero)), scale = Vec::set(grid.scale);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[i][c] = less_product(sums[i][c], zero, totals[c]) * scale;
    }
    store_sums(sums, out, os);
}

template <int C>
inline void codes_rows(const Operand& x, const uint8_t* w, int64_t n, float* out, int64_t os) {
    const int64_t rows = x.rows.count;
    int64_t r = 0;
    for (; C == 4 && r + 8 <= rows; r += 8)
        for (int64_t c = 0; c < C; c += 2)
            codes_block<8, 2>(x, r, w + c * n, n, out + r * os + c, os);
    for (; r + 4 <= rows; r += 4)
        codes_block<4, C>(x, r, w, n, out + r * os, os);
    if (rows - r == 3)
        codes_block<3, C>(x, r, w, n, out + r * os, os);
    else if (rows - r == 2)
        codes_block<2, C>(x, r, w, n, out + r * os, os);
    else if (rows - r == 1)
        codes_block<1, C>(x, r, w, n, out + r * os, os);
}

// Return the lanes of (the only row of x) . (one row of w), in units of the row's scale. The prefetches
// follow the order of the memory.
inline Vec codes_in_order(const Operand& x, const uint8_t* w, int64_t n, Vec zero) {
    Vec sums[2], totals[2]; // independent dependency chains
    for (int i = 0; i < 2; ++i)
        sums[i] = totals[i] = integers(0);
    const auto add = [&](int i, int64_t k, Codes column) {
        totals[i] = dot(totals[i], Codes::set(1), column);
        sums[i] = dot(sums[i], Codes::load(x.codes + k), column);
    };
    int64_t k = 0;
    for (; k + 128 <= n; k += 128)
        for (int i = 0; i < 2; ++i) {
            prefetch(w + k + 64 * i + kAhead);
            add(i, k + 64 * i, Codes::load(w + k + 64 * i));
        }
    for (int i = 0; k < n; k += 64, ++i) {
        prefetch(w + k + kAhead);
        add(i, k, Codes::load(w + k, least(64, n - k)));
    }
    return less_product(sums[0], zero, totals[0]) + less_product(sums[1], zero, totals[1]);
}

inline void multiply_codes_in_order(const Operand& x, const uint8_t* w, int64_t inputs, int64_t columns,
                                    float* out) {
    const Vec zero = integers(static_cast<int32_t>(x.grids[0].zero)), scale = Vec::set(x.grids[0].scale);
    for (int64_t c = 0; c < columns; c += 4, out += 4) {
        const int64_t count = least(4, columns - c);
        Vec sums[1][4] = {};
        for (int64_t i = 0; i < count; ++i, w += inputs)
            sums[0][i] = codes_in_order(x, w, inputs, zero) * scale;
        store_some(sums, count, out);
    }
}

// out[r * os + o - begin] = x row r . row o of an int8 matrix, before the row's factor is applied.
inline void multiply_codes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                           int64_t os) {
    const auto* w = static_cast<const uint8_t*>(m.planes[kCodes]) + begin * m.inputs;
    if (x.rows.count == 1)
        return multiply_codes_in_order(x, w, m.inputs, end - begin, out);
    int64_t o = begin;
#ifndef SLIPSTREAM_AMX
    if (x.byte_lanes) {
        const int64_t done = multiply_lanes<BytesInLanes>(x.byte_lanes, x.rows.count, w, m.inputs, m.inputs,
                                                          end - begin, out, os, x.starts);
        scale_rows(out, x.grids, x.rows.count, done, os);
        o += done, out += done, w += done * m.inputs;
    }
#endif
    for (; o + 4 <= end; o += 4, out += 4, w += 4 * m.inputs)
        codes_rows<4>(x, w, m.inputs, out, os);
    for (; o < end; ++o, ++out, w += m.inputs)
        codes_rows<1>(x, w, m.inputs, out, os);
}

#endif

} // namespace
} // namespace slipstream
