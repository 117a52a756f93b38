// A few rows in float32 times codes that are small floats, with AVX2: they go from their bytes to the
// products without a way through memory. Measured on a Zen 3, one thread, out of memory, beside that way: one
// row of 2048 x 2048 takes 0.50 (fp8) and 0.75 (bf13) of the time, two rows of several shapes 0.32 to 0.50,
// eight 0.49 to 0.62, 47 rows 0.71 to 0.79.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_FLOATS_OF_BYTES

constexpr int kRowsOfFloats = 8; // that meet a code together

struct Bf13Floats {
    static constexpr int64_t kBytes = kBf13Bytes; // of kPackedBlock inputs
    static constexpr float kUnit = 1;
    static void ask(const uint8_t* block, int64_t ahead) { ask_bf13(block, ahead); }
    // Calls take(at, weights of inputs at to at + 8), in the order of `put`.
    template <class F>
    [[gnu::always_inline]] static void each(const uint8_t* block, int64_t, F take) {
        const __m256i zero = _mm256_setzero_si256();
        each_bf13(block, [&](int at, __m256i numbers) {
            take(at, Vec{_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, numbers))});
            take(at + 8, Vec{_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, numbers))});
        });
    }
    // Bytes become float32 in two steps that keep to lanes of sixteen bytes, so that of each sixteen inputs
    // the second four and the third change places; those of a row do once.
    static void put(Vec first, Vec second, float* to) {
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(first.v, second.v, 0x20));
        _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(first.v, second.v, 0x31));
    }
};

struct Fp8Floats {
    static constexpr int64_t kBytes = kPackedBlock;
    static constexpr float kUnit = kFp8Unit;
    static void ask(const uint8_t* codes, int64_t ahead) { prefetch(codes + ahead); }
    template <class F>
    [[gnu::always_inline]] static void each(const uint8_t* codes, int64_t left, F take) {
        uint8_t rest[kPackedBlock];
        if (left < kPackedBlock) {
            std::memset(rest, 0, sizeof(rest));
            std::memcpy(rest, codes, static_cast<size_t>(left));
            codes = rest;
        }
        each_fp8(codes, take);
    }
    static void put(Vec first, Vec second, float* to) {
        first.store(to);
        second.store(to + 8);
    }
};

inline bool in_floats(const Matrix& m) {
    return m.format == kBf13 || m.format == kFp8;
}

// How R rows lie that meet codes together: so many inputs of each of them, one row after the other, then the
// next inputs. They share the first cache with the codes.
template <int R>
constexpr int64_t kFloatsDeep = R == 1 ? int64_t{1} << 40 : 6144 / R / kPackedBlock * kPackedBlock;

template <class F, int R>
inline void put_floats(const float* x, int64_t stride, int64_t inputs, float* to) {
    const int64_t whole = ceil_div(inputs, kPackedBlock) * kPackedBlock;
    for (int64_t from = 0; from < whole; from += kFloatsDeep<R>)
        for (int r = 0; r < R; ++r)
            for (int64_t k = from; k < least(from + kFloatsDeep<R>, whole); k += 16, to += 16) {
                const float* row = x + r * stride;
                F::put(Vec::load(row + least(k, inputs), most(0, least(8, inputs - k))),
                       Vec::load(row + least(k + 8, inputs), most(0, least(8, inputs - k - 8))), to);
            }
}

// out[r * os + o - begin] = row r . row o of the matrix, before its multiplier.
template <class F, int R>
[[gnu::noinline]] void multiply_floats(const float* x, const Matrix& m, int64_t begin, int64_t end,
                                       float* out, int64_t os) {
    constexpr int kChains = R <= 2 ? 4 : (R <= 4 ? 2 : 1); // so many sums that none waits for another
    const PackedRows all(m);
    const int64_t whole = ceil_div(m.inputs, kPackedBlock) * kPackedBlock;
    // One row reads on and on; of several the parts of two rows are some way apart.
    const int64_t ahead = R == 1 || whole <= kFloatsDeep<R> ? kAhead : 2 * m.plane_bytes[kCodes] / m.outputs;
    for (int64_t from = 0; from < whole; from += kFloatsDeep<R>) {
        const int64_t n = least(kFloatsDeep<R>, whole - from);
        const float* part = x + from * R;
        for (int64_t o = begin; o < end; ++o) {
            const uint8_t* codes = all.row(o).codes + from / kPackedBlock * F::kBytes;
            Vec sums[R][kChains];
#pragma GCC unroll 8
            for (auto& row : sums)
#pragma GCC unroll 4
                for (auto& sum : row)
                    sum = Vec::set(0);
            for (int64_t k = 0; k < n; k += kPackedBlock, codes += F::kBytes) {
                F::ask(codes, ahead);
                F::each(codes, m.inputs - from - k, [&](int at, Vec w) {
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        Vec& sum = sums[r][at / 8 % kChains];
                        sum = fma(Vec::load(part + r * n + k + at), w, sum);
                    }
                });
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                Vec sum = sums[r][0];
#pragma GCC unroll 4
                for (int c = 1; c < kChains; ++c)
                    sum = sum + sums[r][c];
                float& to = out[r * os + o - begin];
                to = (from ? to : 0.0f) + F::kUnit * sum.sum();
            }
        }
    }
}

// Calls f(first row, rows as a constant, the format) for rows that meet codes together.
template <class F>
inline void each_of_floats(const Matrix& m, int64_t rows, F f) {
    for (int64_t r = 0; r < rows; r += kRowsOfFloats)
        with_rows<kRowsOfFloats>(least(kRowsOfFloats, rows - r), [&](auto count) {
            if (m.format == kBf13)
                f(r, count, Bf13Floats());
            else
                f(r, count, Fp8Floats());
        });
}

// Rows as they are multiplied, `stride` apart.
inline void float_rows(const float* x, int64_t pitch, int64_t rows, const Matrix& m, float* to,
                       int64_t stride) {
    each_of_floats(m, rows, [&](int64_t r, auto count, auto format) {
        put_floats<decltype(format), decltype(count)::value>(x + r * pitch, pitch, m.inputs, to + r * stride);
    });
}

inline void multiply_floats(const float* x, int64_t stride, int64_t rows, const Matrix& m, int64_t begin,
                            int64_t end, float* out, int64_t os) {
    each_of_floats(m, rows, [&](int64_t r, auto count, auto format) {
        multiply_floats<decltype(format), decltype(count)::value>(x + r * stride, m, begin, end, out + r * os,
                                                                  os);
    });
}

#endif

} // namespace
} // namespace slipstream
