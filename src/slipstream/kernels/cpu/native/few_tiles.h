// A few rows times a packed matrix whose codes are not integers, with AMX tiles: some inputs of sixteen
// matrix rows are converted to bfloat16 at a time, and multiplied with the rows of x in lanes.
#pragma once

namespace slipstream {
namespace {

template <class F, int S>
inline void decoded_bands(const Operand& x, const F& codes, const Matrix& m, int64_t begin, int64_t end,
                          float* out, int64_t os) {
    using Sums = TileSums<1, S>;
    constexpr int64_t kTile = Sums::kBand * kLaneLine, kInputs = 256; // 8 KB at a time
    alignas(64) Bf16 panel[kInputs / kLaneLine * kTile];
    const PackedRows all(m);
    const TileSession session;
    for (int64_t o = begin; o < end; o += Sums::kBand, out += Sums::kBand) {
        const int64_t columns = least(Sums::kBand, end - o);
        const Sums sums(x.lanes, m.inputs);
        // The next band's rows are prefetched in memory order: prefetching further along the current rows
        // would be too late for the rows in between.
        const PackedRow coming = all.row(o + Sums::kBand);
        int64_t asked = 0;
        for (int64_t from = 0; from < m.inputs; from += kInputs) {
            const int64_t to = least(m.inputs, from + kInputs);
            for (int64_t j = 0; j < Sums::kBand; ++j) {
                const PackedRow row = all.row(o + least(j, columns - 1));
                Bf16* at = panel + j * kLaneLine;
                for (int64_t k = from; k < to; k += F::kStep) {
                    Bf16Lanes w[F::kLanes];
                    F::template ask<0>(coming, asked);
                    asked += F::kStep;
                    if (k + F::kStep <= to)
                        codes.load(row, k, w);
                    else
                        codes.load(row, k, to - k, w);
                    for (int l = 0; l < F::kLanes; ++l, at += kTile)
                        w[l].store(at);
                }
            }
            const Bf16* tile = panel;
            for (int64_t k = from; k < to; k += 2 * kLaneLine, tile += 2 * kTile) {
                sums.template add<0>(k, tile, kLaneLine);
                if (k + kLaneLine < to)
                    sums.template add<Sums::kChains - 1>(k + kLaneLine, tile + kTile, kLaneLine);
            }
        }
        sums.turn(x.in_lanes, columns, out, os);
    }
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's factor is applied.
inline void multiply_decoded_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                   int64_t os) {
    const auto run = [&](const auto& codes) {
        using F = typename std::decay<decltype(codes)>::type;
        if (x.in_lanes <= kLaneGroup)
            return decoded_bands<F, 1>(x, codes, m, begin, end, out, os);
        return decoded_bands<F, 2>(x, codes, m, begin, end, out, os);
    };
    if (m.format == kFp8)
        return run(Fp8Codes(m));
    return run(Bf13Codes(m));
}

} // namespace
} // namespace slipstream
