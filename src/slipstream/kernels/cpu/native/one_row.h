// One row in digits times a packed matrix, whose codes are whole numbers as they are: sums are exact in
// int32. That takes a third of the instructions of lanes of bfloat16, so memory is what a single row waits
// for.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// The row . a row of codes that have one multiplier.
template <class F, int N>
inline Vec digit_dot(const Operand& x, const PackedRow& row, int64_t inputs) {
    CodeSums sums[2][N]; // chains that do not wait for each other
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

// The row . a row of fp6. Lanes of int32 hold the sums over sixteen inputs, of the two highest digits
// together.
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

// The row . a row of int4; G groups in 128 inputs.
template <int N, int G>
inline Vec digit_dot_grouped(const Operand& x, const PackedRow& row, const GroupNumbers& numbers,
                             int64_t groups) {
    Vec sums[2] = {Vec::set(0), Vec::set(0)};
    const Half* minima = row.minima ? row.minima : row.scales;
    for (int64_t g = 0; g < groups; g += Vec::kWidth) {
        prefetch(reinterpret_cast<const char*>(row.scales + g) + kAhead / 8);
        prefetch(reinterpret_cast<const char*>(minima + g) + kAhead / 8);
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
        prefetch(codes + kAhead);
        add(Codes::load(codes), numbers.of<G>(scales), sums[0]);
        prefetch(codes + kAhead + 64);
        add(Codes::load(codes + 64), numbers.of<G>(scales + G), sums[1]);
    }
    if (left >= G) {
        prefetch(codes + kAhead);
        add(Codes::load(codes), numbers.of<G>(scales), sums[0]);
        left -= G, codes += 64, scales += G;
    }
    if (left) {
        prefetch(codes + kAhead);
        add(Codes::load(codes, left * (64 / G)), numbers.of(scales, left), sums[1]);
    }
    return sums[0] + sums[1];
}

// out[c] = the sum of sums[c], `count` <= 4 of them.
inline void store_some(const Vec (&sums)[1][4], int64_t count, float* out) {
    if (count == 4)
        return store_sums(sums, out, 0);
    float all[4];
    store_sums(sums, all, 0);
    std::memcpy(out, all, static_cast<size_t>(count) * sizeof(float));
}

// out[o - begin] = row_sum(row o), which is the row of x . row o of a packed matrix in some units: rows are
// read as they lie.
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

// out[o - begin] = the row . row o of a packed matrix, before its multiplier.
template <int N>
inline void multiply_digits(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out) {
    const auto by_row = [&](auto codes) {
        using F = decltype(codes);
        multiply_rows(m, x.unit * F::kUnit, begin, end, out,
                      [&](const PackedRow& row) { return digit_dot<F, N>(x, row, m.inputs); });
    };
    const auto by_group = [&](auto in_128) {
        const GroupNumbers numbers(m.group);
        const int64_t groups = ceil_div(m.inputs, m.group);
        multiply_rows(m, x.unit, begin, end, out, [&](const PackedRow& row) {
            return digit_dot_grouped<N, decltype(in_128)::value>(x, row, numbers, groups);
        });
    };
    const auto sixes = [&] {
        const GroupNumbers numbers(32); // a quarter of the lanes each
        const int64_t groups = ceil_div(m.inputs, m.group);
        multiply_rows(m, x.unit * Fp6Bytes::kUnit, begin, end, out,
                      [&](const PackedRow& row) { return digit_dot_sixes<N>(x, row, numbers, groups); });
    };
    if (m.format == kInt8)
        by_row(Int8Bytes());
    else if (m.format == kFp6E2m3)
        sixes();
    else if (m.group == 32)
        by_group(std::integral_constant<int, 4>());
    else if (m.group == 64)
        by_group(std::integral_constant<int, 2>());
    else
        by_group(std::integral_constant<int, 1>());
}

#endif

} // namespace
} // namespace slipstream
