// A few rows times a dense bfloat16 matrix by AMX tiles: sixteen pairs of inputs in lanes have the layout of
// a tile, and so have 32 inputs of sixteen rows of the matrix. Nothing is copied except the remainder of a
// row.
//
// A vector instruction does 32 products and takes two cycles on processors with AMX: an Emerald Rapids
// reaches 0.09 TFLOP/s with it, with one thread at 2.9 GHz. A tile product does 8192 in sixteen cycles, or in
// 52 if it depends on the previous one: two threads multiply 5632 x 2048 from memory in 932 us with one row,
// in 1004 with eight and in 1077 with 32, by vectors in 1714 and 4950.
#pragma once

namespace slipstream {
namespace {

// Sums of B bands of sixteen rows of w by S groups of rows of x in lanes, in two independent chains if S is
// 1. Tiles 0 to 3 are accumulators, 4 and 5 hold lanes, 6 and 7 rows of w.
template <int B, int S>
class TileSums {
public:
    static constexpr int kChains = S == 1 ? 2 : 1;
    static constexpr int64_t kBand = 16, kRows = B * kBand;

    TileSums(const Bf16* lanes, int64_t inputs) : lanes_(lanes), group_(lane_items(inputs)) {
        each<0>([](auto tile, int64_t) { tile_zero<decltype(tile)::value>(); });
    }

    // Adds inputs [k, k + kLaneLine) of all rows of w, `ws` apart, to chain C.
    template <int C>
    void add(int64_t k, const Bf16* w, int64_t ws) const {
        const Bf16* from = lanes_ + k * kLaneGroup;
        tile_load<4 + C>(from, 64);
        if constexpr (S > 1)
            tile_load<5>(from + group_, 64);
        band<C, 0>(w, ws);
    }

    // out[r * os + j] = row j of w . row r of x, for `columns` rows of w and `rows` rows of x.
    void turn(int64_t rows, int64_t columns, float* out, int64_t os) const {
        constexpr int64_t kFloats = kRows * S * kLaneGroup;
        alignas(64) float sums[kChains * kFloats];
        each<0>([&](auto tile, int64_t at) {
            tile_store<decltype(tile)::value>(sums + at,
                                              S * kLaneGroup * static_cast<int64_t>(sizeof(float)));
        });
        for (int64_t i = 0; kChains == 2 && i < kFloats; i += Vec::kWidth)
            (Vec::load(sums + i) + Vec::load(sums + (kChains - 1) * kFloats + i)).store(sums + i);
        for (int64_t j = 0; j < columns; j += kBand)
            turn_lanes<S>(sums + j * S * kLaneGroup, rows, least(kBand, columns - j), out + j, os);
    }

private:
    // Calls f(tile, offset of its sums among those of all chains) for each tile.
    template <int I, class F>
    static void each(F f) {
        constexpr int kOfChain = B * S;
        f(std::integral_constant<int, I>(),
          I / kOfChain * kRows * S * kLaneGroup + (I % kOfChain / S * kBand * S + I % S) * kLaneGroup);
        if constexpr (I + 1 < kChains * kOfChain)
            each<I + 1>(f);
    }

    template <int C, int I>
    static void band(const Bf16* w, int64_t ws) {
        constexpr int kSum = (C * B + I) * S;
        tile_load<6 + I>(w + I * kBand * ws, ws * static_cast<int64_t>(sizeof(Bf16)));
        tile_dot_bf16<kSum, 6 + I, 4 + C>();
        if constexpr (S > 1)
            tile_dot_bf16<kSum + 1, 6 + I, 5>();
        if constexpr (I + 1 < B)
            band<C, I + 1>(w, ws);
    }

    const Bf16* lanes_;
    int64_t group_;
};

// out[r * os + j] = x row r . row j of B bands of w.
template <int B, int S>
inline void multiply_bands(const Bf16* x, int64_t rows, const Bf16* w, int64_t ws, int64_t inputs, float* out,
                           int64_t os) {
    using Sums = TileSums<B, S>;
    const Sums sums(x, inputs);
    // The block after the next is prefetched line by line in memory order.
    const char* next = reinterpret_cast<const char*>(w + 2 * Sums::kRows * ws);
    const auto ask = [&] {
#pragma GCC unroll 32
        for (int64_t line = 0; line < Sums::kRows; ++line)
            prefetch(next + 64 * line);
        next += 64 * Sums::kRows;
    };
    int64_t k = 0;
    for (; k + 2 * kLaneLine <= inputs; k += 2 * kLaneLine) {
        ask();
        sums.template add<0>(k, w + k, ws);
        ask();
        sums.template add<Sums::kChains - 1>(k + kLaneLine, w + k + kLaneLine, ws);
    }
    if (k + kLaneLine <= inputs) {
        sums.template add<0>(k, w + k, ws);
        k += kLaneLine;
    }
    if (k < inputs) { // beyond the last inputs lies memory that is not part of the row
        alignas(64) Bf16 ends[Sums::kRows * kLaneLine];
        for (int64_t j = 0; j < Sums::kRows; ++j)
            Bf16Lanes::load(w + j * ws + k, inputs - k).store(ends + j * kLaneLine);
        sums.template add<0>(k, ends, kLaneLine);
    }
    sums.turn(rows, Sums::kRows, out, os);
}

template <int S>
inline int64_t multiply_tiles(const Bf16* x, int64_t rows, const Bf16* w, int64_t ws, int64_t inputs,
                              int64_t columns, float* out, int64_t os) {
    constexpr int64_t kBand = TileSums<1, S>::kBand;
    if (columns < kBand)
        return 0;
    const TileSession session;
    int64_t c = 0;
    for (; c + 2 * kBand <= columns; c += 2 * kBand)
        multiply_bands<2, S>(x, rows, w + c * ws, ws, inputs, out + c, os);
    for (; c < columns; c += kBand) {
        const int64_t from = least(c, columns - kBand); // may repeat some of the last band
        multiply_bands<1, S>(x, rows, w + from * ws, ws, inputs, out + from, os);
    }
    return columns;
}

// out[r * os + j] = x row r . w row j. Returns how many of the `columns` rows of w were done: all, or none if
// they do not fill a band.
inline int64_t multiply_lanes(const Bf16* x, int64_t rows, const Bf16* w, int64_t ws, int64_t inputs,
                              int64_t columns, float* out, int64_t os) {
    if (rows <= kLaneGroup)
        return multiply_tiles<1>(x, rows, w, ws, inputs, columns, out, os);
    return multiply_tiles<2>(x, rows, w, ws, inputs, columns, out, os);
}

} // namespace
} // namespace slipstream
