// Rows times a matrix, for both layouts of a matrix: `dots` where inputs are contiguous, `mix` where outputs
// are.
#pragma once

namespace slipstream {
namespace {

// out[r * os + j] = x row r . row j of a matrix, for up to kPanel rows of the matrix; `fill(k, n, panel,
// stride)` writes their inputs [k, k + n) to a panel.
template <class P, int kPanel, class Fill>
inline void multiply_panel(const typename P::X* x, const Rows& rows, int64_t inputs, int64_t columns,
                           float* out, int64_t os, Fill fill) {
    constexpr int64_t kDeep = 512, kRowsAtOnce = 16;
    alignas(64) typename P::W panel[kPanel * kDeep];
    alignas(64) float part[kRowsAtOnce * kPanel];
    for (int64_t r = 0; r < rows.count; ++r)
        std::memset(out + r * os, 0, static_cast<size_t>(columns) * sizeof(float));
    for (int64_t k = 0; k < inputs; k += kDeep) {
        const int64_t n = least(kDeep, inputs - k);
        fill(k, n, panel, kDeep);
        for (int64_t r = 0; r < rows.count; r += kRowsAtOnce) {
            const int64_t count = least(kRowsAtOnce, rows.count - r);
            dots<P>(x + r * rows.stride + k, rows.stride, count, panel, kDeep, columns, n, part, kPanel);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < columns; ++j)
                    out[(r + i) * os + j] += part[i * kPanel + j];
        }
    }
}

constexpr int kPanel = 8;
// From this many rows on, weights are widened to float32 once per panel instead of once per block of rows,
// where widening takes several instructions: with 16 rows of 576 x 576 in bfloat16 the baseline takes 0.27 of
// the time of widening once for every two rows.
constexpr int64_t kFewestWidened = Vec::kWidth > 4 ? kManyRows : 1;

// out[r * os + j] = x row r . run row begin + j, for `columns` rows of a run.
template <class T>
inline void multiply_run(const Rows& x, const Run& run, int64_t inputs, int64_t begin, int64_t columns,
                         float* out, int64_t os) {
    const T* w = static_cast<const T*>(run.data);
    if (run.transposed) {
        for (int64_t r = 0; r < x.count; ++r)
            std::memset(out + r * os, 0, static_cast<size_t>(columns) * sizeof(float));
        for (int64_t k = 0; k < inputs; k += kDeep)
            mix<T>(x.full + k, x.stride, x.count, w + k * run.stride + begin, run.stride,
                   least(kDeep, inputs - k), columns, out, os);
        return;
    }
#ifdef SLIPSTREAM_BF16_DOT
    if constexpr (std::is_same<T, Bf16>::value) {
        if (x.rounded) {
            dots<Bf16Pairs>(x.rounded, x.stride, x.count, w + begin * run.stride, run.stride, columns, inputs,
                            out, os);
            return;
        }
    }
#endif
    const T* first = w + begin * run.stride;
    if (x.count == 1 && inputs <= kInOrder<T>)
        return dots_in_order<Widened<T>>(x.full, first, run.stride, columns, inputs, out);
    if (sizeof(T) < sizeof(float) && x.count >= kFewestWidened) {
        for (int64_t o = 0; o < columns; o += kPanel, first += kPanel * run.stride) {
            const int64_t some = least(kPanel, columns - o);
            multiply_panel<Widened<float>, kPanel>(x.full, x, inputs, some, out + o, os,
                                                   [&](int64_t k, int64_t n, float* panel, int64_t stride) {
                                                       for (int64_t i = 0; i < some; ++i)
                                                           copy_row(first + i * run.stride + k,
                                                                    panel + i * stride, n);
                                                   });
        }
        return;
    }
    dots<Widened<T>>(x.full, x.stride, x.count, first, run.stride, columns, inputs, out, os);
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's multiplier.
inline void multiply_packed(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                            int64_t os) {
#ifdef SLIPSTREAM_BF16_DOT
    if (x.codes)
        return multiply_codes(x, m, begin, end, out, os);
    if (x.digits)
        return multiply_digits(x, m, begin, end, out);
#ifdef SLIPSTREAM_AMX
    if (x.lanes)
        return multiply_decoded_lanes(x, m, begin, end, out, os);
#endif
    if (x.byte_lanes)
        multiply_bytes(x, m, begin, end, out, os);
    if (x.terms)
        multiply_few(x, m, begin, end, out + x.in_lanes * os, os);
    if (x.terms || x.in_lanes)
        return;
#else
    if (x.words && x.by_rows)
        return multiply_by_rows(x, m, begin, end, out, os);
    if (x.words && x.units)
        return multiply_word_lanes(x, m, begin, end, out, os);
    if (x.words)
        return multiply_words(x, m, begin, end, out);
#ifdef SLIPSTREAM_FLOATS_OF_BYTES
    if (x.floats)
        return multiply_floats(x.floats, x.stride, x.rows.count, m, begin, end, out, os);
#endif
#endif
    const Rows& rows = x.rows;
    if (m.format == kInt8 && !rows.rounded &&
        rows.count < kFewestWidened) { // codes are widened on their way to the registers
        const auto* w = static_cast<const int8_t*>(m.planes[kCodes]) + begin * m.inputs;
        if (rows.count == 1)
            dots_in_order<Widened<int8_t>>(rows.full, w, m.inputs, end - begin, m.inputs, out);
        else
            dots<Widened<int8_t>>(rows.full, rows.stride, rows.count, w, m.inputs, end - begin, m.inputs, out,
                                  os);
        return;
    }
    if (rows.count == 1 && !rows.rounded)
        return multiply_decoded(rows.full, m, begin, end, out);
    for (int64_t o = begin; o < end; o += kPanel, out += kPanel) {
        const int64_t columns = least(kPanel, end - o);
        const auto fill = [&](int64_t k, int64_t n, auto* panel, int64_t stride) {
            decode(m, o, columns, k, n, panel, stride);
        };
#ifdef SLIPSTREAM_BF16_DOT
        if (rows.rounded) {
            multiply_panel<Bf16Pairs, kPanel>(rows.rounded, rows, m.inputs, columns, out, os, fill);
            continue;
        }
#endif
        multiply_panel<Widened<float>, kPanel>(rows.full, rows, m.inputs, columns, out, os, fill);
    }
}

// Multiplies column j of each row of x by factors[j].
inline void scale_columns(float* x, int64_t rows, int64_t columns, int64_t stride, const float* factors) {
    for (int64_t j = 0; j < columns; j += Vec::kWidth) {
        const int64_t n = least(columns - j, Vec::kWidth);
        const Vec f = Vec::load(factors + j, n);
        for (int64_t r = 0; r < rows; ++r)
            (Vec::load(x + r * stride + j, n) * f).store(x + r * stride + j, n);
    }
}

// out[r * os + o - begin] = x row r . matrix row o + bias, for outputs [begin, end).
inline void multiply(const Operand& operand, const Matrix& m, int64_t begin, int64_t end, float* out,
                     int64_t os) {
    const Rows& x = operand.rows;
    const int64_t columns = end - begin;
    if (m.format != kPlain) {
        multiply_packed(operand, m, begin, end, out, os);
        scale_columns(out, x.count, columns, os, row_factors(m) + begin);
        if (operand.grids && !operand.codes)
            scale_rows(out, operand.grids, x.count, columns, os);
    }
    int64_t first = 0;
    for (int64_t i = 0; i < m.num_runs; first += m.runs[i++].rows) {
        const int64_t from = most(begin, first), to = least(end, first + m.runs[i].rows);
        if (from >= to)
            continue;
        with_dtype(m.dtype, [&](auto* type) {
            using T = typename std::remove_pointer<decltype(type)>::type;
            int64_t done = 0; // columns done for the rows in lanes
#ifdef SLIPSTREAM_BF16_DOT
            const Run& run = m.runs[i];
            if constexpr (std::is_same<T, Bf16>::value)
                if (operand.lanes && !run.transposed)
                    done = multiply_lanes(operand.lanes, operand.in_lanes,
                                          static_cast<const T*>(run.data) + (from - first) * run.stride,
                                          run.stride, m.inputs, to - from, out + from - begin, os);
            if (done && operand.in_lanes < x.count)
                multiply_run<T>(x.from(operand.in_lanes), run, m.inputs, from - first, done,
                                out + operand.in_lanes * os + from - begin, os);
#endif
            if constexpr (std::is_same<T, Bf16>::value)
                if (operand.parted)
                    return dots_parted(operand.parted,
                                       static_cast<const T*>(m.runs[i].data) +
                                           (from - first) * m.runs[i].stride,
                                       m.runs[i].stride, to - from, m.inputs, out + from - begin);
            if (from + done < to)
                multiply_run<T>(x, m.runs[i], m.inputs, from + done - first, to - from - done,
                                out + from + done - begin, os);
        });
    }
    if (!m.bias)
        return;
    with_dtype(m.bias_dtype, [&](auto* type) {
        const auto* bias = static_cast<decltype(type)>(const_cast<void*>(m.bias)) + begin;
        for (int64_t j = 0; j < columns; j += Vec::kWidth) {
            const int64_t n = least(columns - j, Vec::kWidth);
            const Vec b = Vec::load(bias + j, n);
            for (int64_t r = 0; r < x.count; ++r)
                (Vec::load(out + r * os + j, n) + b).store(out + r * os + j, n);
        }
    });
}

} // namespace
} // namespace slipstream
