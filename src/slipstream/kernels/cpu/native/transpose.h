// Squares of words, as wide as a vector, that are turned: row i becomes column i. Elements are only moved,
// whatever their bits mean.
#pragma once

namespace slipstream {
namespace {

// out[c * os + r] = in[r * is + c]. A function of its own: within loops over squares the compiler has a
// counter in memory for each of their addresses (a third of the time of results that are turned).
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

// One after the other; units with wide registers have functions of their own for numbers of 16 bits.
template <class T>
inline void store_both(Vec a, Vec b, T* p) {
    a.store(p);
    b.store(p + Vec::kWidth);
}

// The same of two squares, the second behind the first: rows of `out` are twice as long.
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
