// Rows times a matrix that is stored transposed: inputs by outputs.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kDeep = 32; // inputs of a transposed matrix at a time: their pages stay in the TLB

// out[r * os + j] += sum over k of x[r * xs + k] * v[k * vs + j], for R rows and `width` columns in S
// vectors.
template <class T, int R, int S>
inline void mix_block(const float* x, int64_t xs, const T* v, int64_t vs, int64_t n, int64_t width,
                      float* out, int64_t os) {
    const int64_t tail = width - (S - 1) * Vec::kWidth; // lanes of the last vector
    const bool whole = tail == Vec::kWidth;
    Vec sums[R][S];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s) {
            const float* at = out + r * os + s * Vec::kWidth;
            sums[r][s] = s + 1 < S || whole ? Vec::load(at) : Vec::load(at, tail);
        }
    constexpr int64_t kBytes = S * Vec::kWidth * static_cast<int64_t>(sizeof(T));
    for (int64_t k = 0; k < n; ++k) {
        // Each row lies in other pages, and hardware prefetchers do not cross pages.
        const char* coming = reinterpret_cast<const char*>(v + (k + kDeep) * vs);
        for (int64_t line = 0; line < kBytes; line += 64)
            prefetch(coming + line);
        Vec parts[S];
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s) {
            const T* at = v + k * vs + s * Vec::kWidth;
            parts[s] = s + 1 < S || whole ? Vec::load(at) : Vec::load(at, tail);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec factor = Vec::set(x[r * xs + k]);
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s] = fma(factor, parts[s], sums[r][s]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s) {
            float* at = out + r * os + s * Vec::kWidth;
            if (s + 1 < S || whole)
                sums[r][s].store(at);
            else
                sums[r][s].store(at, tail);
        }
}

template <class T, int R>
inline void mix_rows(const float* x, int64_t xs, const T* v, int64_t vs, int64_t n, int64_t width, float* out,
                     int64_t os) {
    constexpr int kVectors = R > 2 ? 4 : 8;
    constexpr int64_t kWide = kVectors * Vec::kWidth, kNarrow = 4 * Vec::kWidth;
    int64_t j = 0;
    for (; j + kWide <= width; j += kWide)
        mix_block<T, R, kVectors>(x, xs, v + j, vs, n, kWide, out + j, os);
    for (; j + kNarrow <= width; j += kNarrow)
        mix_block<T, R, 4>(x, xs, v + j, vs, n, kNarrow, out + j, os);
    for (; j < width; j += Vec::kWidth)
        mix_block<T, R, 1>(x, xs, v + j, vs, n, least(width - j, Vec::kWidth), out + j, os);
}

// out[r * os + j] += sum over k of x[r * xs + k] * v[k * vs + j].
template <class T>
inline void mix(const float* x, int64_t xs, int64_t rows, const T* v, int64_t vs, int64_t n, int64_t width,
                float* out, int64_t os) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        mix_rows<T, 4>(x + r * xs, xs, v, vs, n, width, out + r * os, os);
    for (; r + 2 <= rows; r += 2)
        mix_rows<T, 2>(x + r * xs, xs, v, vs, n, width, out + r * os, os);
    if (r < rows)
        mix_rows<T, 1>(x + r * xs, xs, v, vs, n, width, out + r * os, os);
}

} // namespace
} // namespace slipstream
