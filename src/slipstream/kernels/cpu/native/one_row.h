// One row in digits times a packed matrix whose codes are used as integers: sums are exact in int32. This
// takes a third of the instructions of bfloat16 lanes, so a single row is memory-bound.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// The row . a row of codes that have a single multiplier.
template <class F, int N>
inline Vec digit_dot(const Operand& x, const PackedRow& row, int64_t inputs) {
    CodeSums sums[2][N]; // independent chains
    for (int i = 0; i < N; ++i) {
        std::memcpy(&sums[0][i], x.starts + 16 * i, sizeof(sums[0][i]));
        sums[1][i] = CodeSums::of(Vec::set(0));
    }
    const auto add = [&](Codes codes, int64_t k, CodeSums(&to)[N]) {
#pragma GCC unroll 3
        for (int i = 0; i < N; ++i)
            to[i] = dot(to[i], codes, Codes::load(x.digits + i * x.stride + k));
    };
    int64_t k = 0;
    for (; k + 128 <= inputs; k += 128) {
        F::ask(row, k);
        add(F::load(row, k), k, sums[0]);
        F::ask(row, k + 64);
        add(F::load(row, k + 64), k + 64, sums[1]);
    }
    if (k < inputs)
        F::ask(row, k);
    if (k + 64 <= inputs) {
        add(F::load(row, k), k, sums[0]);
        k += 64;
    }
    if (k < inputs)
        add(F::load(row, k, inputs - k), k, sums[1]);
    Vec sum = as_floats(sums[0][0] + sums[1][0]);
    for (int i = 1; i < N; ++i)
        sum = fma(sum, Vec::set(256), as_floats(sums[0][i] + sums[1][i]));
    return sum;
}

// The row . a row of fp6. An int32 lane can hold the sum over sixteen inputs of the two highest digits
// combined.
template <int N>
inline Vec digit_dot_sixes(const Operand& x, PackedRow row, const GroupNumbers& numbers, int64_t groups) {
    Vec sums[2] = {Vec::set(0), Vec::set(0)};
    const uint8_t* digits = x.digits;
    const int32_t* starts = x.starts;
    const auto add = [&](const auto& codes, Vec scale, Vec& sum) {
        CodeSums all[N] = {CodeSums::of(Vec::set(0))};
        for (int i = 1; i < N; ++i, starts += 16)
            std::memcpy(&all[i], starts, sizeof(all[i]));
        for (const Codes& some : codes) {
            const Codes eighths = Fp6Bytes::of(some);
#pragma GCC unroll 3
            for (int i = 0; i < N; ++i)
                all[i] = dot(all[i], eighths, Codes::load(digits + i * x.stride));
            digits += 64;
        }
        Vec whole = as_floats(raise(all[0]) + all[1]);
        for (int i = 2; i < N; ++i)
            whole = fma(whole, Vec::set(256), as_floats(all[i]));
        sum = fma(whole, scale, sum);
    };
    const auto four = [&](Vec& sum) {
        Codes codes[4];
        Sixes::turned(row.codes, row.crumbs, codes);
        Sixes::ask<kAhead>(row.codes, row.crumbs, row.scales);
        add(codes, numbers.of<4>(row.scales), sum);
        row.codes += 128, row.crumbs += 64, row.scales += 4;
    };
    for (; groups >= 8; groups -= 8) {
        four(sums[0]);
        four(sums[1]);
    }
    if (groups >= 4)
        four(sums[0]);
    groups %= 4;
    if (groups > 0)
        Sixes::ask<kAhead>(row.codes, row.crumbs, row.scales);
    for (; groups > 0; --groups) {
        const Codes codes[1] = {Sixes::plain(row.codes, row.crumbs)};
        add(codes, everywhere(row.scales), sums[1]);
        row.codes += 32, row.crumbs += 16, ++row.scales;
    }
    return sums[0] + sums[1];
}

// The row . a row of int4, with G groups in 128 inputs.
template <int N, int G>
inline Vec digit_dot_grouped(const Operand& x, const PackedRow& row, const GroupNumbers& numbers,
                             int64_t groups) {
    Vec sums[2] = {Vec::set(0), Vec::set(0)};
    const Half* minima = row.minima ? row.minima : row.scales;
    for (int64_t g = 0; g < groups; g += Vec::kWidth) {
        prefetch(reinterpret_cast<const char*>(row.scales + g) + kPackedAhead / 8);
        prefetch(reinterpret_cast<const char*>(minima + g) + kPackedAhead / 8);
        const Vec here =
            g + Vec::kWidth <= groups ? Vec::load(minima + g) : Vec::load(minima + g, groups - g);
        sums[0] = fma(here, Vec::load(x.sums + g), sums[0]);
    }
    if (!row.minima)
        sums[0] = sums[0] * Vec::set(-8);
    const uint8_t *codes = row.codes, *digits = x.digits;
    const Half* scales = row.scales;
    const auto add = [&](Codes both, Vec scale, Vec& sum) {
        const Nibbles of(both);
        CodeSums all = CodeSums::of(Vec::set(0));
#pragma GCC unroll 3
        for (int i = 0; i < N; ++i) {
            all = dot(i ? raise(all) : all, of.low, Codes::load(digits + i * x.stride));
            all = dot(all, of.high, Codes::load(digits + i * x.stride + 64));
        }
        sum = fma(as_floats(all), scale, sum);
        digits += 128;
    };
    int64_t left = groups;
    for (; left >= 2 * G; left -= 2 * G, codes += 128, scales += 2 * G) {
        prefetch(codes + kPackedAhead);
        add(Codes::load(codes), numbers.of<G>(scales), sums[0]);
        prefetch(codes + kPackedAhead + 64);
        add(Codes::load(codes + 64), numbers.of<G>(scales + G), sums[1]);
    }
    if (left >= G) {
        prefetch(codes + kPackedAhead);
        add(Codes::load(codes), numbers.of<G>(scales), sums[0]);
        left -= G, codes += 64, scales += G;
    }
    if (left) {
        prefetch(codes + kPackedAhead);
        add(Codes::load(codes, left * (64 / G)), numbers.of(scales, left), sums[1]);
    }
    return sums[0] + sums[1];
}

// The row . short rows of int4, four at a time: these share loads of the digits, of which a Zen 4 does one
// register per cycle. Scales and minima are converted to float32 sixteen groups at a time; if at most 64
// inputs are left after that, two rows share a register.
template <int N, bool kMinima>
class ShortRows {
public:
    ShortRows(const Operand& x, const Matrix& m)
        : x_(x), spread_(m.group), group_bytes_(m.group / 2), groups_(ceil_div(m.inputs, m.group)),
          last_(groups_ % 16 * group_bytes_ <= 32 ? groups_ % 16 : 0), ends_(last_ * group_bytes_, last_) {}

    [[gnu::always_inline]] void multiply(const PackedRow (&rows)[4], float* out) const {
        Vec sums[1][4];
        for (Vec& sum : sums[0])
            sum = Vec::set(0);
        const int64_t alone = groups_ - last_;
        int64_t g = 0;
        for (; g + 16 <= alone; g += 16)
            turn<true>(rows, g, 16, sums[0]);
        if (g < alone)
            turn<false>(rows, g, alone - g, sums[0]);
        if (last_)
            end(rows, alone, sums[0]);
        for (Vec& sum : sums[0])
            sum = sum * Vec::set(x_.unit);
        store_sums(sums, out, 0);
    }

private:
    struct Digits {
        template <class L>
        Digits(const uint8_t* from, int64_t stride, L load) {
#pragma GCC unroll 3
            for (int i = 0; i < N; ++i) {
                low[i] = load(from + i * stride);
                high[i] = load(from + i * stride + 64);
            }
        }
        Vec dot_with(Codes both) const {
            const Nibbles of(both);
            CodeSums all = CodeSums::of(Vec::set(0));
#pragma GCC unroll 3
            for (int i = 0; i < N; ++i)
                all = dot(dot(i ? raise(all) : all, of.low, low[i]), of.high, high[i]);
            return as_floats(all);
        }
        Codes low[N], high[N];
    };

    // Adds `count` groups of each row from group g on, sixteen if kWhole.
    template <bool kWhole>
    [[gnu::always_inline]] void turn(const PackedRow (&rows)[4], int64_t g, int64_t count,
                                     Vec (&sums)[4]) const {
        const auto numbers = [&](const Half* p) {
            prefetch(reinterpret_cast<const char*>(p) + kPackedAhead / 8);
            return kWhole ? Vec::load(p) : Vec::load(p, count);
        };
        const Vec inputs = Vec::load(x_.sums + g);
        Vec scales[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            scales[r] = numbers(rows[r].scales + g);
            sums[r] = fma(kMinima ? numbers(rows[r].minima + g) : scales[r] * Vec::set(-8), inputs, sums[r]);
        }
        const int64_t first = g * group_bytes_, bytes = count * group_bytes_;
        const auto add = [&](int64_t b, auto load) {
            const Lanes16 lanes = spread_.lanes(b / 64);
            const Digits digits(x_.digits + 2 * (first + b), x_.stride,
                                [](const uint8_t* p) { return Codes::load(p); });
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                prefetch(rows[r].codes + first + b + kPackedAhead);
                const Vec products = digits.dot_with(load(rows[r].codes + first + b));
                sums[r] = fma(products, lanes.of(scales[r]), sums[r]);
            }
        };
        int64_t b = 0;
        for (; b + 64 <= bytes; b += 64)
            add(b, [](const uint8_t* p) { return Codes::load(p); });
        if (!kWhole && b < bytes)
            add(b, [&](const uint8_t* p) { return Codes::load(p, bytes - b); });
    }

    // Adds the last groups of each row, from group g on.
    [[gnu::always_inline]] void end(const PackedRow (&rows)[4], int64_t g, Vec (&sums)[4]) const {
        const int64_t first = g * group_bytes_;
        const Digits digits(x_.digits + 2 * first, x_.stride,
                            [](const uint8_t* p) { return RowEnds::both(p); });
        const Vec inputs = RowEnds::both(x_.sums + g);
#pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2) {
            const PackedRow &a = rows[r], &b = rows[r + 1];
            prefetch(a.codes + first + kPackedAhead);
            prefetch(b.codes + first + kPackedAhead);
            const Vec scales = ends_.numbers(a.scales + g, b.scales + g);
            const Vec least_code =
                kMinima ? ends_.numbers(a.minima + g, b.minima + g) : scales * Vec::set(-8);
            const Vec products = digits.dot_with(ends_.codes(a.codes + first, b.codes + first));
            const Vec both = fma(products, ends_.lanes.of(scales), least_code * inputs);
            RowEnds::part(both, sums[r], sums[r + 1]);
        }
    }

    const Operand& x_;
    GroupSpread spread_;
    int64_t group_bytes_, groups_, last_;
    RowEnds ends_;
};

// out[c] = the sum of the lanes of sums[c], for `count` <= 4 of them.
inline void store_some(const Vec (&sums)[1][4], int64_t count, float* out) {
    if (count == 4)
        return store_sums(sums, out, 0);
    float all[4];
    store_sums(sums, all, 0);
    std::memcpy(out, all, static_cast<size_t>(count) * sizeof(float));
}

// out[o - begin] = unit * row_sum(row o), where row_sum returns x . row o of a packed matrix in multiples of
// `unit`. Rows are read one after another.
template <class S>
inline void multiply_rows(const Matrix& m, float unit, int64_t begin, int64_t end, float* out, S row_sum) {
    const PackedRows all(m);
    for (int64_t o = begin; o < end; o += 4, out += 4) {
        const int64_t count = least(4, end - o);
        Vec sums[1][4] = {};
        for (int64_t c = 0; c < count; ++c)
            sums[0][c] = row_sum(all.row(o + c)) * Vec::set(unit);
        store_some(sums, count, out);
    }
}

// out[o - begin] = the row . row o of int4. Short rows are read four at a time, which is close to memory
// order, and longer ones one after another. Measured on a Zen 4, one thread, from memory, four at a time
// compared with one by one: 1536 inputs take 0.98 of the time, 2048 inputs 0.96 to 1.0, 5632 inputs 1.01.
template <int N>
inline void multiply_int4(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out) {
    constexpr int64_t kShort = 2048;
    const auto four = [&](const auto& short_rows) {
        const PackedRows all(m);
        for (; begin + 4 <= end; begin += 4, out += 4)
            short_rows.multiply({all.row(begin), all.row(begin + 1), all.row(begin + 2), all.row(begin + 3)},
                                out);
    };
    if (m.inputs <= kShort && m.format == kInt4)
        four(ShortRows<N, true>(x, m));
    else if (m.inputs <= kShort)
        four(ShortRows<N, false>(x, m));
    const auto by_group = [&](auto in_128) {
        const GroupNumbers numbers(m.group);
        const int64_t groups = ceil_div(m.inputs, m.group);
        multiply_rows(m, x.unit, begin, end, out, [&](const PackedRow& row) {
            return digit_dot_grouped<N, decltype(in_128)::value>(x, row, numbers, groups);
        });
    };
    if (m.group == 32)
        by_group(std::integral_constant<int, 4>());
    else if (m.group == 64)
        by_group(std::integral_constant<int, 2>());
    else
        by_group(std::integral_constant<int, 1>());
}

// out[o - begin] = the row . row o of a packed matrix, before the row's multiplier.
inline void multiply_digits(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out) {
    const int count = digits_of(m);
    const auto run = [&](auto digits) {
        constexpr int N = decltype(digits)::value;
        if (is_int4(m))
            return multiply_int4<N>(x, m, begin, end, out);
        if constexpr (N > 1) {
            if (m.format == kInt8)
                return multiply_rows(
                    m, x.unit * Int8Bytes::kUnit, begin, end, out,
                    [&](const PackedRow& row) { return digit_dot<Int8Bytes, N>(x, row, m.inputs); });
            const GroupNumbers numbers(32); // each covers a quarter of the lanes
            const int64_t groups = ceil_div(m.inputs, m.group);
            multiply_rows(m, x.unit * Fp6Bytes::kUnit, begin, end, out,
                          [&](const PackedRow& row) { return digit_dot_sixes<N>(x, row, numbers, groups); });
        }
    };
    if (count == 1)
        run(std::integral_constant<int, 1>());
    else if (count == 2)
        run(std::integral_constant<int, 2>());
    else
        run(std::integral_constant<int, 3>());
}

#endif

} // namespace
} // namespace slipstream
