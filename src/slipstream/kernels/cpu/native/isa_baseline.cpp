// Any processor: four floats at a time, in the compiler's own vector types.
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "types.h"

namespace slipstream {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float widen(float x) {
    return x;
}
inline float widen(int8_t x) {
    return static_cast<float>(x);
}
inline float widen(Bf16 x) {
    return from_bits(static_cast<uint32_t>(x.bits) << 16);
}
inline float widen(Half x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00)
        return from_bits(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
    if (rest >= 0x400)
        return from_bits(sign | ((rest + 0x1c000) << 13));
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f; // 2^-24
    return sign ? -small : small;
}

inline void narrow(float x, float* to) {
    *to = x;
}
inline void narrow(float x, Bf16* to) {
    const uint32_t bits = to_bits(x);
    to->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Half* to) {
    const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000)
        half = 0x7e00;
    else if (rest >= 0x477ff000)
        half = 0x7c00;
    else if (rest < 0x38800000)
        half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000; // the addition rounds to multiples of 2^-24
    else
        half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    to->bits = static_cast<uint16_t>(sign | half);
}

struct Vec {
    static constexpr int kWidth = 4, kRows = 2, kCols = 4;
    static constexpr int kBlockRows = 4, kBlockGroups = 2;
    static constexpr bool kBf16Dot = false;
    F4 v;

    static Vec set(float x) { return {F4{x, x, x, x}}; }
    static Vec repeat(const float* p) { return set(*p); }
    static Vec load(const float* p) {
        Vec r;
        std::memcpy(&r.v, p, 16);
        return r;
    }
    template <class T>
    static Vec load(const T* p) {
        return {F4{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}};
    }
    template <class T>
    static Vec load(const T* p, int64_t n) {
        if (n == kWidth)
            return load(p);
        Vec r = set(0);
        for (int64_t i = 0; i < n; ++i)
            r.v[i] = widen(p[i]);
        return r;
    }
    // Widens 8 numbers: the result holds those of even index, and `odd` the others. (Little-endian.)
    static Vec load_pairs(const Bf16* p, Vec& odd) {
        I4 raw;
        std::memcpy(&raw, p, sizeof(raw));
        odd.v = reinterpret_cast<F4>(raw & -0x10000);
        return {reinterpret_cast<F4>(raw << 16)};
    }
    static Vec load_pairs(const Bf16* p, int64_t n, Vec& odd) {
        Bf16 whole[8] = {};
        std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(Bf16));
        return load_pairs(whole, odd);
    }
    void store(float* p) const { std::memcpy(p, &v, 16); }
    template <class T>
    void store(T* p) const {
        for (int i = 0; i < 4; ++i)
            narrow(v[i], p + i);
    }
    template <class T>
    void store(T* p, int64_t n) const {
        if (n == kWidth)
            return store(p);
        for (int64_t i = 0; i < n; ++i)
            narrow(v[i], p + i);
    }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    float highest() const {
        const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
};

template <int R, int C>
inline void store_sums(const Vec (&v)[R][C], float* out, int64_t os) {
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            out[r * os + c] = v[r][c].sum();
}

inline Vec operator+(Vec a, Vec b) {
    return {a.v + b.v};
}
inline Vec operator-(Vec a, Vec b) {
    return {a.v - b.v};
}
inline Vec operator*(Vec a, Vec b) {
    return {a.v * b.v};
}
inline Vec operator/(Vec a, Vec b) {
    return {a.v / b.v};
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return {a.v * b.v + c.v};
}
// Like the x86 instructions, max and min return the second operand if either is NaN.
inline Vec max(Vec a, Vec b) {
    return {a.v > b.v ? a.v : b.v};
}
inline Vec min(Vec a, Vec b) {
    return {a.v < b.v ? a.v : b.v};
}
inline Vec abs(Vec a) {
    I4 bits;
    std::memcpy(&bits, &a.v, sizeof(bits));
    bits &= 0x7fffffff;
    std::memcpy(&a.v, &bits, sizeof(bits));
    return a;
}
// Return a < b ? yes : no for each lane.
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
    return {a.v < b.v ? yes.v : no.v};
}
// Round to the nearest integer, for |a| < 2^22.
inline Vec round(Vec a) {
    const F4 magic = F4{12582912, 12582912, 12582912, 12582912};
    return {(a.v + magic) - magic};
}
// Return 2^a for integers from -126 to 127.
inline Vec power_of_two(Vec a) {
    const I4 bits = (__builtin_convertvector(a.v, I4) + 127) << 23;
    Vec r;
    std::memcpy(&r.v, &bits, 16);
    return r;
}
inline Vec times_power_of_two(Vec p, Vec n) {
    return p * power_of_two(n);
}
// Return the bits of float16 magnitudes divided by 2^kShift, rounded to the nearest integer, ties to even, at
// most kMost.
template <int kShift, int kMost>
inline int short_half(int size) {
    const int code = (size + ((size >> kShift) & 1) + (1 << (kShift - 1)) - 1) >> kShift;
    return code < kMost ? code : kMost;
}
// See `Floats` in pack_numbers.h.
template <int kShift, int kMost>
inline Vec shortened(Vec size) {
    Half halves[4];
    size.store(halves);
    for (Half& half : halves)
        half.bits = static_cast<uint16_t>(short_half<kShift, kMost>(half.bits) << kShift);
    return Vec::load(halves);
}
template <int kShift, int kSign, int kMost>
inline void store_short(Vec v, uint8_t* codes) {
    Half halves[4];
    v.store(halves);
    for (int i = 0; i < 4; ++i) {
        const int code = short_half<kShift, kMost>(halves[i].bits & 0x7fff);
        codes[i] = static_cast<uint8_t>(code | (halves[i].bits >> 15) << kSign);
    }
}
// Store the low bytes of integers.
inline void store_low_bytes(Vec x, uint8_t* p) {
    for (int i = 0; i < 4; ++i)
        p[i] = static_cast<uint8_t>(static_cast<int>(x.v[i]));
}
// Store integers of at most 15 bits plus sign as words.
inline void store_words(Vec x, int16_t* p) {
    for (int i = 0; i < 4; ++i)
        p[i] = static_cast<int16_t>(x.v[i]);
}
// Transpose a square.
inline void transpose(Vec (&v)[4]) {
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = v[i].v[j];
            v[i].v[j] = v[j].v[i];
            v[j].v[i] = kept;
        }
}

// Load columns 0 to 3 of four rows; they are moved as bits.
inline void load_columns(const float* in, int64_t is, Vec (&v)[4]) {
    for (int r = 0; r < 4; ++r)
        for (int c = 0; c < 4; ++c)
            std::memcpy(reinterpret_cast<char*>(&v[c].v) + r * sizeof(float), in + r * is + c, sizeof(float));
}
// 16-bit integers, see isa_avx2_words.h.
struct Words {
    typedef int16_t Lanes __attribute__((vector_size(16)));
    static constexpr int kWidth = 8;
    Lanes v;

    void store(int16_t* p) const { std::memcpy(p, &v, sizeof(v)); }
    static Words load(const int16_t* p) {
        Words r;
        std::memcpy(&r.v, p, sizeof(r.v));
        return r;
    }
    static Words load(const int8_t* p) {
        typedef int8_t Bytes8 __attribute__((vector_size(8)));
        Bytes8 bytes;
        std::memcpy(&bytes, p, sizeof(bytes));
        return {__builtin_convertvector(bytes, Lanes)};
    }
    static void halves(const uint8_t* p, Words& low, Words& high) {
        typedef uint8_t Bytes8 __attribute__((vector_size(8)));
        Bytes8 bytes;
        std::memcpy(&bytes, p, sizeof(bytes));
        const Lanes both = __builtin_convertvector(bytes, Lanes);
        low.v = both & 15;
        high.v = both >> 4;
    }
    static void eighths(const uint8_t* codes, const uint8_t* crumbs, Words (&to)[8]) {
        typedef uint8_t Bytes16 __attribute__((vector_size(16)));
        Bytes16 both[2], two;
        std::memcpy(both, codes, sizeof(both));
        std::memcpy(&two, crumbs, sizeof(two));
        for (int i = 0; i < 4; ++i) {
            const Bytes16 size = i % 2 ? both[i / 2] >> 4 : both[i / 2] & 15, upper = two >> 2 * i;
            const Bytes16 full = (size & 7) | 8, large = (size & 8) != 0 ? full << 2 : full << 1;
            const Bytes16 either = (upper & 1) != 0 ? large : size;
            const Bytes16 some = (upper & 2) != 0 ? -either : either;
            int8_t whole[16];
            std::memcpy(whole, &some, sizeof(whole));
            to[2 * i] = load(whole);
            to[2 * i + 1] = load(whole + 8);
        }
    }
};
struct WordSums {
    I4 v = {0, 0, 0, 0};
};
inline WordSums dot(WordSums sum, Words a, Words b) {
#ifdef __SSE2__
    return {sum.v + (I4)_mm_madd_epi16((__m128i)a.v, (__m128i)b.v)};
#else
    typedef int32_t I8 __attribute__((vector_size(32)));
    const I8 all = __builtin_convertvector(a.v, I8) * __builtin_convertvector(b.v, I8);
    return {sum.v + I4{all[0], all[2], all[4], all[6]} + I4{all[1], all[3], all[5], all[7]}};
#endif
}
struct WordPairs : Words {
    static WordPairs load(const int16_t* p) { return {Words::load(p)}; }
    // The W pairs at `p`, repeated over all lanes.
    template <int W>
    static WordPairs spread(const int16_t* p) {
        static_assert(W == 1 || W == 2 || W == 4, "whole parts of a vector");
        int16_t all[8];
        for (int i = 0; i < 8; i += 2 * W)
            std::memcpy(all + i, p, 4 * W);
        return load(all);
    }
};
struct PairSums : WordSums {
    static PairSums of(Vec x) {
        PairSums r;
        std::memcpy(&r.v, &x.v, sizeof(r.v));
        return r;
    }
    Vec bits() const {
        Vec r;
        std::memcpy(&r.v, &v, sizeof(v));
        return r;
    }
    Vec floats() const { return {__builtin_convertvector(v, F4)}; }
};
inline PairSums dot(PairSums sum, WordPairs a, WordPairs b) {
    return {slipstream::dot(static_cast<WordSums>(sum), a, b)};
}
struct WordTotals {
    F4 v = {0, 0, 0, 0};
    static WordTotals of(WordSums sum) { return {__builtin_convertvector(sum.v, F4)}; }
    static WordTotals folded(Vec x) { return {x.v}; }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
};
inline WordTotals fma(WordTotals a, float factor, WordTotals b) {
    return {a.v * factor + b.v};
}
inline WordTotals operator+(WordTotals a, WordTotals b) {
    return {a.v + b.v};
}

} // namespace
} // namespace slipstream

#include "table.h"

namespace slipstream {
constexpr Kernels kBaseline =
    table(); // a compile-time constant: no code of this unit runs when the library is loaded
}
