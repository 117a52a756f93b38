// Transposes squares of 32-bit elements, as wide as a vector. Elements are only moved, whatever their bits
// mean.
#pragma once

namespace slipstream {
namespace {

// out[c * os + r] = in[r * is + c]. Not inlined: inside loops over squares the compiler would keep a counter
// in memory for each of their addresses, which takes a third of the time of transposing results.
template <class T>
[[gnu::noinline]] void transpose(const float* in, int64_t is, T* out, int64_t os) {
    for (int c = 0; c < Vec::kWidth; c += 4, in += 4, out += 4 * os) {
        Vec columns[4];
        load_columns(in, is, columns);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            columns[i].store(out + i * os);
    }
}

// Stores two vectors one after the other; instruction sets with wide registers overload this for 16-bit
// numbers.
template <class T>
inline void store_both(Vec a, Vec b, T* p) {
    a.store(p);
    b.store(p + Vec::kWidth);
}

// Transposes two squares, the second below the first: rows of `out` are twice as long.
template <class T>
[[gnu::noinline]] void transpose_two(const float* in, int64_t is, T* out, int64_t os) {
    for (int c = 0; c < Vec::kWidth; c += 4, in += 4, out += 4 * os) {
        Vec first[4], second[4];
        load_columns(in, is, first);
        load_columns(in + Vec::kWidth * is, is, second);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            store_both(first[i], second[i], out + i * os);
    }
}

} // namespace
} // namespace slipstream
