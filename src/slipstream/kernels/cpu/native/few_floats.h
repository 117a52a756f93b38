// A few rows in float32 times codes that are small floats, with AVX2: the codes are converted in registers,
// without a detour through memory. Measured on a Zen 3, one thread, weights not in the caches, relative to
// that detour: one row of 2048 x 2048 takes 0.50 (fp8) and 0.75 (bf13) of the time, two rows of several
// shapes 0.32 to 0.50, eight 0.49 to 0.62, 47 rows 0.71 to 0.79.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_FLOATS_OF_BYTES

constexpr int kRowsOfFloats = 8; // rows that are multiplied with a code at once

struct Bf13Floats {
    static constexpr int64_t kBytes = kBf13Bytes; // per kPackedBlock inputs
    static constexpr float kUnit = 1;
    static void ask(const uint8_t* block, int64_t ahead) { ask_bf13(block, ahead); }
    // Call take(at, weights of inputs at to at + 8), in the order of `put`.
    template <class F>
    [[gnu::always_inline]] static void each(const uint8_t* block, int64_t, F take) {
        const __m256i zero = _mm256_setzero_si256();
        each_bf13(block, [&](int at, __m256i numbers) {
            take(at, Vec{_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, numbers))});
            take(at + 8, Vec{_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, numbers))});
        });
    }
    // Store sixteen inputs in the order in which the weights are converted. The conversion to float32 in two
    // steps stays within 16-byte lanes, which swaps the second and the third four of each sixteen weights;
    // instead, the inputs of a row are swapped once.
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

// Inputs per block of R rows that are multiplied at once: that many inputs of each row, one row after
// another, then the next inputs. The rows of a block share the first-level cache with the codes.
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

// out[r * os + o - begin] = row r . row o of the matrix, before the row's factor is applied.
template <class F, int R>
[[gnu::noinline]] void multiply_floats(const float* x, const Matrix& m, int64_t begin, int64_t end,
                                       float* out, int64_t os) {
    constexpr int kChains = R <= 2 ? 4 : (R <= 4 ? 2 : 1); // enough independent sums to hide the latency
    const PackedRows all(m);
    const int64_t whole = ceil_div(m.inputs, kPackedBlock) * kPackedBlock;
    // One row of x reads the matrix continuously; with several, the parts of two matrix rows are some
    // distance apart.
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

// Call f(first row, number of rows as a constant, format) for each block of rows that are multiplied at once.
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

// Store rows in the order in which they are multiplied, `stride` apart.
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
