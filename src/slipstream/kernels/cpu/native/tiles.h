// The AMX tile registers (eight of sixteen rows of 64 bytes) and their products. With SLIPSTREAM_EMULATE_AMX
// the same operations in plain C++, for machines without AMX.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; TDPBF16PS,
// TDPBSUD, TDPBSSD.
#pragma once

namespace slipstream {
namespace {

// Tiles 0 to 3 are accumulators. Tiles 6 and 7, the left sides of products, have rows of `left` bytes; tiles
// 4 and 5, the right sides, have one row per four of those bytes.
struct alignas(64) TileShape {
    explicit TileShape(int64_t left) {
        bytes[6] = bytes[7] = static_cast<uint16_t>(left);
        rows[4] = rows[5] = static_cast<uint8_t>(left / 4);
    }
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShape) == 64, "the processor reads 64 bytes");

#ifdef SLIPSTREAM_EMULATE_AMX

struct SoftTile {
    uint32_t words[16][16];
};
thread_local SoftTile soft_tiles[8];
thread_local TileShape soft_shape{64};
thread_local bool soft_tiles_on = false;

inline void tiles_on(const TileShape& shape) {
    soft_shape = shape;
    soft_tiles_on = true;
}
inline void tiles_off() {
    soft_tiles_on = false;
}
// Traps if the tiles are not configured, as the processor does.
inline SoftTile& soft_tile(int number) {
    if (!soft_tiles_on)
        __builtin_trap();
    return soft_tiles[number];
}

template <int T>
inline void tile_zero() {
    std::memset(&soft_tile(T), 0, sizeof(SoftTile));
}
template <int T>
inline void tile_load(const void* from, int64_t bytes) {
    tile_zero<T>();
    for (int r = 0; r < soft_shape.rows[T]; ++r)
        std::memcpy(soft_tile(T).words[r], static_cast<const char*>(from) + r * bytes, soft_shape.bytes[T]);
}
template <int T>
inline void tile_stream(const void* from, int64_t bytes) {
    tile_load<T>(from, bytes);
}
template <int T>
inline void tile_store(void* to, int64_t bytes) {
    for (int r = 0; r < 16; ++r)
        std::memcpy(static_cast<char*>(to) + r * bytes, soft_tile(T).words[r], 64);
}

inline float soft_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// C[m][n] += the sum over k of the products of the bfloat16 pairs A[m][k] and B[k][n].
template <int C, int A, int B>
inline void tile_dot_bf16() {
    const SoftTile &a = soft_tile(A), &b = soft_tile(B);
    for (int m = 0; m < 16; ++m) {
        float sums[16];
        std::memcpy(sums, soft_tile(C).words[m], sizeof(sums));
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                const uint32_t x = a.words[m][k], y = b.words[k][n];
                sums[n] += soft_float(x << 16) * soft_float(y << 16);
                sums[n] += soft_float(x & 0xffff0000) * soft_float(y & 0xffff0000);
            }
        std::memcpy(soft_tile(C).words[m], sums, sizeof(sums));
    }
}

// C[m][n] += the sum over k of the products of the groups of four bytes A[m][k], signed, and B[k][n], of type
// `Right`, in int32.
template <int C, int A, int B, class Right>
inline void soft_dot_fours() {
    const SoftTile &a = soft_tile(A), &b = soft_tile(B);
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n)
                for (int shift = 0; shift < 32; shift += 8) {
                    const int32_t x = static_cast<int8_t>(a.words[m][k] >> shift);
                    const int32_t y = static_cast<Right>(b.words[k][n] >> shift);
                    soft_tile(C).words[m][n] += static_cast<uint32_t>(x * y);
                }
}
template <int C, int A, int B>
inline void tile_dot_codes() { // B is unsigned
    soft_dot_fours<C, A, B, uint8_t>();
}
template <int C, int A, int B>
inline void tile_dot_digits() { // B is signed
    soft_dot_fours<C, A, B, int8_t>();
}

#else

// Tile numbers are encoded in the instructions, and the compiler's intrinsics do not accept template
// constants as such; hence inline assembly.
inline void tiles_on(const TileShape& shape) {
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}
inline void tiles_off() {
    __asm__ volatile("tilerelease" ::: "memory");
}

template <int T>
inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, int64_t bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(T) : "memory");
}
// Like tile_load, for data that need not stay in L1.
template <int T>
inline void tile_stream(const void* from, int64_t bytes) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_codes() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_digits() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// Configures the tiles for the lifetime of this object: a parked thread holds no tile state, so the system
// need not save it.
struct TileSession {
    explicit TileSession(int64_t left = 64) { tiles_on(TileShape(left)); }
    ~TileSession() { tiles_off(); }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;
};

} // namespace
} // namespace slipstream
