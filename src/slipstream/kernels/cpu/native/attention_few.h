// A few rows of queries against keys and values in place: a decode step reads each key once, so transposing
// and packing would not pay.
#pragma once

namespace slipstream {
namespace {

// Maximum query rows per kv head for which this is faster.
constexpr int64_t kFewQueries = 8;

// Rows that are processed next, prefetched in small batches: the processor stalls if more prefetches are
// issued than it can track.
template <class T>
struct Soon {
    const T* const* rows;
    int64_t n, bytes; // bytes of a row
    void ask(int64_t begin, int64_t end) const {
        for (int64_t j = begin; j < least(end, n); ++j)
            for (int64_t line = 0; line < bytes; line += 64)
                prefetch(reinterpret_cast<const char*>(rows[j]) + line);
    }
};

// scores[i * kTileKeys + j] = row i of queries . key j, for R rows. The last block of keys is filled up with
// copies of the last key.
template <class P, int R, class T>
inline void few_scores(const float* q, int64_t slots, const T* const* rows, int64_t n, int64_t dim,
                       const Soon<T>& soon, float* scores) {
    constexpr int kCols = Vec::kCols;
    constexpr int64_t kElements = P::kDepth * Vec::kWidth;
    for (int64_t j = 0; j < n; j += kCols) {
        soon.ask(j, j + kCols);
        const T* keys[kCols];
#pragma GCC unroll 16
        for (int c = 0; c < kCols; ++c)
            keys[c] = rows[least(j + c, n - 1)];
        Vec sums[R][kCols], parts[kCols];
#pragma GCC unroll 16
        for (auto& row : sums)
#pragma GCC unroll 16
            for (auto& sum : row)
                sum = Vec::set(0);
        const auto add = [&](int i, Vec x) {
#pragma GCC unroll 16
            for (int c = 0; c < kCols; ++c)
                sums[i][c] = P::Sum::add(sums[i][c], x, parts[c]);
        };
        int64_t d = 0;
        for (; d + kElements <= dim; d += kElements) {
#pragma GCC unroll 16
            for (int c = 0; c < kCols; ++c)
                parts[c] = P::along(keys[c] + d, kElements);
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i)
                add(i, Vec::load(q + i * slots + d / P::kDepth));
        }
        if (d < dim) {
#pragma GCC unroll 16
            for (int c = 0; c < kCols; ++c)
                parts[c] = P::along(keys[c] + d, dim - d);
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i)
                add(i, Vec::load(q + i * slots + d / P::kDepth, ceil_div(dim - d, P::kDepth)));
        }
        store_sums(sums, scores + j, kTileKeys);
    }
}

// out[i * os + d] += sum over keys j of weight (i, j) * value j[d], for R rows and C vectors of columns.
template <class P, int R, int C, class T>
inline void few_values(const float* weights, const T* const* rows, int64_t n, int64_t d, int64_t dim,
                       const Soon<T>& soon, float* out, int64_t os) {
    Vec sums[R][C], parts[C];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[i][c] = Vec::load(out + i * os + d + c * Vec::kWidth);
    const auto add = [&](int64_t j) {
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const Vec factor = Vec::repeat(weights + i * kTileKeys + j / P::kDepth);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
                sums[i][c] = P::Sum::add(sums[i][c], factor, parts[c]);
        }
    };
    int64_t j = 0;
    for (; j + P::kDepth <= n; j += P::kDepth) {
        soon.ask(j, j + P::kDepth);
        const T *p = rows[j] + d, *q = rows[j + P::kDepth - 1] + d;
        if constexpr (C > 1)
            P::across(p, q, parts);
        else
            parts[0] = P::across(p, q, least(dim - d, Vec::kWidth));
        add(j);
    }
    if (j < n) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            parts[c] = P::across(rows[j] + d + c * Vec::kWidth, static_cast<const T*>(nullptr),
                                 least(dim - d - c * Vec::kWidth, Vec::kWidth));
        add(j);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
            sums[i][c].store(out + i * os + d + c * Vec::kWidth);
}

// The two products of a strip of rows: with the keys and with the values of one kv head.
template <class P, class T>
struct FewRows {
    const float* q;
    int64_t slots;
    const T* const* keys;
    const T* const* values;
    int64_t n, dim;
    Soon<T> soon_keys, soon_values;

    void score(int64_t count, float* scores) const {
        Soon<T> soon = soon_keys;
        blocks(count, [&](auto rows, int64_t r) {
            few_scores<P, decltype(rows)::value>(q + r * slots, slots, keys, n, dim, soon,
                                                 scores + r * kTileKeys);
            soon.n = 0;
        });
        soon_keys.ask(n, kTileKeys);
    }
    void mix(int64_t count, const float* weights, float* out, int64_t os) const {
        constexpr int64_t kWide = Vec::kCols * Vec::kWidth;
        Soon<T> soon = soon_values;
        blocks(count, [&](auto rows, int64_t r) {
            constexpr int R = decltype(rows)::value;
            const float* w = weights + r * kTileKeys;
            int64_t d = 0;
            for (; d + kWide <= dim; d += kWide, soon.n = 0)
                few_values<P, R, Vec::kCols>(w, values, n, d, dim, soon, out + r * os, os);
            for (; d < dim; d += Vec::kWidth, soon.n = 0)
                few_values<P, R, 1>(w, values, n, d, dim, soon, out + r * os, os);
        });
        soon_values.ask(n, kTileKeys);
    }

private:
    // Call `f` with a compile-time number of rows, and the first of these rows.
    template <class F>
    static void blocks(int64_t count, F f) {
        int64_t r = 0;
        for (; r + Vec::kRows <= count; r += Vec::kRows)
            f(std::integral_constant<int, Vec::kRows>(), r);
        if (Vec::kRows > 3 && count - r == 3)
            f(std::integral_constant<int, 3>(), r);
        else if (Vec::kRows > 2 && count - r == 2)
            f(std::integral_constant<int, 2>(), r);
        else if (count - r == 1)
            f(std::integral_constant<int, 1>(), r);
    }
};

} // namespace
} // namespace slipstream
