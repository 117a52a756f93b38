// Shared by all packing: reading rows, and the numbers that weights are rounded to, with the same operations
// as formats/int8.py and minifloat.py.
//
// Each kind of number defines the factor by which a weight is multiplied before rounding, in addition to its
// scale, and the values to which the largest magnitude of a row or group may be scaled.
#pragma once

namespace slipstream {
namespace {

// Calls f(v, j) for each vector v of [begin, end), where j is the index of its first number; the last vector
// is padded with zeros.
template <class T, class F>
inline void over(const T* x, int64_t begin, int64_t end, F f) {
    int64_t j = begin;
    for (; j + Vec::kWidth <= end; j += Vec::kWidth)
        f(Vec::load(x + j), j);
    if (j < end)
        f(Vec::load(x + j, end - j), j);
}

// Reads a row into `x` in float32, and returns its largest magnitude.
inline float read_row(const PackCall& call, int64_t r, float* x) {
    const int64_t n = call.packed.inputs;
    Vec largest = Vec::set(0.0f);
    with_dtype(call.dtype, [&](auto* type) {
        const auto* from = static_cast<decltype(type)>(const_cast<void*>(call.dense)) + r * call.stride;
        over(from, 0, n, [&](Vec v, int64_t j) {
            largest = max(abs(v), largest);
            j + Vec::kWidth <= n ? v.store(x + j) : v.store(x + j, n - j);
        });
    });
    return largest.highest();
}

inline float inverse(float scale) {
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

// Integers of magnitude at most 127.
struct Integers {
    static constexpr int kTargets = 3;
    static constexpr float kTarget[kTargets] = {127.0f, 127.25f, 127.5f}, kFactor = 1.0f;

    // The nearest representable magnitude.
    static Vec nearest(Vec size) { return min(round(size), Vec::set(127.0f)); }
    static void encode(Vec v, uint8_t* codes) {
        store_low_bytes(max(min(round(v), Vec::set(127.0f)), Vec::set(-127.0f)), codes);
    }
};

// Floats whose codes are the bits of float16 without the last kShift, at most kMost, with the sign at bit
// kSign.
template <int kShift, int kSign, int kMost>
struct Floats {
    static Vec nearest(Vec size) { return shortened<kShift, kMost>(size); }
    static void encode(Vec v, uint8_t* codes) { store_short<kShift, kSign, kMost>(v, codes); }
};
struct E4m3 : Floats<7, 7, 0x7e> {
    static constexpr int kTargets = 4;
    static constexpr float kTarget[kTargets] = {448.0f, 384.0f, 320.0f, 256.0f}, kFactor = 1.0f / 256;
};
struct E2m3 : Floats<7, 5, 31> {
    static constexpr int kTargets = 6;
    static constexpr float kTarget[kTargets] = {7.5f, 7.0f, 6.5f, 6.0f, 5.5f, 5.0f}, kFactor = 1.0f / 16384;
};
struct E3m2 : Floats<8, 5, 31> {
    static constexpr int kTargets = 4;
    static constexpr float kTarget[kTargets] = {28.0f, 24.0f, 20.0f, 16.0f}, kFactor = 1.0f / 4096;
};

} // namespace
} // namespace slipstream
