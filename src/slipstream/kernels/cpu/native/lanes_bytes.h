// Groups of sixteen rows, as integers in digits, times a packed matrix with integer codes. The codes of eight
// of its rows are unpacked into L1 as bytes once; four rows at a time are then multiplied with the same four
// inputs of sixteen rows. Sums are exact in int32 until they are multiplied by a scale.
//
// Measured with 16 rows of bfloat16, one thread of a Zen 4, compared with eight rows twice: 576 x 576 in the
// cache takes 0.84 (int8), 0.77 (int4) and 0.77 (fp6) of the time, 2048 x 2048 from memory 0.95, 0.82 and
// 0.75.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

constexpr int64_t kBytesPitch = kBytesDeep + 64; // not a power of two

// The codes of some inputs of kLaneRows rows of the matrix, and the scale and offset of each of their groups.
struct ByteTile {
    alignas(64) uint8_t codes[kLaneRows][kBytesPitch];
    alignas(64) float scales[kLaneRows][16], middles[kLaneRows][16]; // values of the code 0
};

// How many rows ahead a tile prefetches. Measured on a Zen 5, eight rows from memory, two threads, compared
// with tiles that prefetch along their own rows: int4 of 5632 x 2048 takes 0.84 of the time, of 2048 x 5632
// 0.56, fp6 0.92 and 0.85.
constexpr int64_t kRowsAhead = 2 * kLaneRows;

// Unpacks inputs [k, k + n) of rows of the matrix from o on; if fewer rows than a tile has are left, the last
// one is repeated. Prefetches the scales, minima and upper bits of rows ahead.
template <class F>
inline void fill_tile(const Matrix& m, const PackedRows& all, int64_t o, int64_t columns, int64_t k,
                      int64_t n, ByteTile& tile) {
    for (int64_t c = 0; c < kLaneRows; ++c) {
        const PackedRow row = all.row(o + least(c, columns - 1));
        F::bring(row, k, n, tile.codes[c], kInRows);
        if constexpr (F::kScales) {
            bring_scales<F>(m, row, k, n, tile.scales[c], tile.middles[c]);
            const PackedRow next = all.row(o + c + kRowsAhead);
            prefetch(next.scales + k / m.group);
            if (next.minima)
                prefetch(next.minima + k / m.group);
            for (int64_t b = k; next.crumbs && b < k + n; b += 256)
                prefetch(next.crumbs + b / 4);
        }
    }
}

// Rows of x in lanes, from some input on.
struct ByteLanes {
    const uint8_t* digits;
    int64_t group, apart;  // bytes between groups of rows, and between digits
    const int32_t* starts; // initial values of the sums of each digit, for each span
    const float* sums;     // over each group of codes
    int64_t starts_group, sums_group;
    const uint8_t* coming; // codes to prefetch, of rows ahead
};

// sums[r][s] += the products of `inputs` inputs of R rows of a tile, from `row` on, with S groups of rows of
// x in N digits, each row in W lanes. With several digits registers hold only the sums of one span.
template <int R, int S, int W, int N, bool kScales, bool kMinima>
[[gnu::noinline]] void bytes_tile(const ByteLanes& x, const ByteTile& tile, int row, int64_t inputs,
                                  int64_t span, float* sums) {
    constexpr bool kHeld = N == 1;
    constexpr int64_t kCodesOfByte = kScales ? 2 : 1;
    const uint8_t *codes = tile.codes[row], *coming = x.coming + inputs * row / kCodesOfByte;
    sums += row * S * kLaneGroup;
    Vec totals[kHeld ? R : 1][S];
#pragma GCC unroll 16
    for (int r = 0; kHeld && r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            totals[r][s] = Vec::load(sums + (r * S + s) * kLaneGroup);
    for (int64_t g = 0; g * span < inputs; ++g) {
        CodeSums parts[N][R][S];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s) {
                std::memcpy(&parts[n][0][s], x.starts + s * x.starts_group + (g * N + n) * kLaneGroup, 64);
#pragma GCC unroll 16
                for (int r = 1; r < R; ++r)
                    parts[n][r][s] = parts[n][0][s];
            }
        for (int64_t i = g * span; i < least((g + 1) * span, inputs); i += 4 * W) {
            // Prefetching all lines at once would keep memory busy now and idle later: 2048 inputs, eight
            // rows of x and one thread of a Zen 4 then take 1.37 times as long.
            if (i % 64 < 4 * W * R / kCodesOfByte) {
                prefetch(coming);
                coming += 64;
            }
            Codes lanes[N][S];
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
                for (int s = 0; s < S; ++s)
                    lanes[n][s] = Codes::load(x.digits + n * x.apart + s * x.group + i * (kLaneGroup / W));
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Codes some = Codes::spread<W>(codes + r * kBytesPitch + i);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
                    for (int s = 0; s < S; ++s)
                        parts[n][r][s] = dot(parts[n][r][s], some, lanes[n][s]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s) {
                Vec whole = as_floats(N == 1 ? parts[0][r][s] : raise(parts[0][r][s]) + parts[N > 1][r][s]);
#pragma GCC unroll 16
                for (int n = 2; n < N; ++n)
                    whole = fma(whole, Vec::set(256), as_floats(parts[n][r][s]));
                float* to = sums + (r * S + s) * kLaneGroup;
                Vec total = kHeld ? totals[r][s] : Vec::load(to);
                total = kScales ? fma(whole, Vec::set(tile.scales[row + r][g]), total) : whole + total;
                if (kMinima)
                    total = fma(Vec::load(x.sums + s * x.sums_group + g * kLaneGroup),
                                Vec::set(tile.middles[row + r][g]), total);
                if constexpr (kHeld)
                    totals[r][s] = total;
                else
                    total.store(to);
            }
    }
#pragma GCC unroll 16
    for (int r = 0; kHeld && r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            totals[r][s].store(sums + (r * S + s) * kLaneGroup);
}

// out[r * os + o - begin] = row r of x, counted from group `g`, . row o of a packed matrix, for S groups of
// rows in W lanes each, of which `rows` rows are written.
template <class F, int S, int W, int N, bool kMinima>
inline void bytes_rows(const Operand& x, const Matrix& m, int64_t g, int64_t rows, int64_t begin, int64_t end,
                       float* out, int64_t os) {
    constexpr int R = kLaneRows / S; // what fits in registers
    alignas(64) float block[2 * kLaneRows][S][kLaneGroup];
    const PackedRows all(m);
    ByteTile tile;
    const int64_t span = lane_span(m);
    const ByteRoom room(m, N);
    Vec units[S];
    for (int s = 0; s < S; ++s)
        units[s] = Vec::load(x.units + (g + s) * kLaneGroup) * Vec::set(F::kUnit);
    for (int64_t o = begin; o < end; o += 2 * kLaneRows, out += 2 * kLaneRows) {
        const int64_t columns = least(2 * kLaneRows, end - o);
        std::memset(block, 0, sizeof(block));
        for (int64_t half = 0; half < columns; half += kLaneRows)
            for (int64_t k = 0; k < m.inputs; k += kBytesDeep) {
                const int64_t n = least(kBytesDeep, m.inputs - k);
                fill_tile<F>(m, all, o + half, least(kLaneRows, columns - half), k, n, tile);
                const ByteLanes some = {x.byte_lanes + g * room.digits + k * (kLaneGroup / W),
                                        room.digits,
                                        x.lanes_apart,
                                        x.starts + g * room.starts + k / span * N * kLaneGroup,
                                        x.lane_sums + g * room.sums + k / span * kLaneGroup,
                                        room.starts,
                                        room.sums,
                                        all.row(o + half + kRowsAhead).codes +
                                            kLaneRows * k / F::kCodesOfByte};
                for (int row = 0; row < kLaneRows; row += R)
                    bytes_tile<R, S, W, N, F::kScales, kMinima>(some, tile, row, n, span, block[half][0]);
            }
        for (auto& column : block)
            for (int s = 0; s < S; ++s)
                (Vec::load(column[s]) * units[s]).store(column[s]);
        turn_lanes<S, W>(block[0][0], rows, columns, out, os);
    }
}

#ifndef SLIPSTREAM_AMX // AMX uses tiles, see lanes_byte_tiles.h
// Digits of one group of rows, multiplied with int8 codes that are read in place: the combined sum of the
// digits is added to `out`.
//
// Measured on a Zen 5, one thread, compared with a tile of bytes: eight rows of 2048 x 2048 from memory take
// 160 us instead of 204, sixteen 296 instead of 357; of 1536 x 384 in the cache 26 instead of 29, and 45
// instead of 47.
struct DigitsInLanes : BytesInLanes {
    template <int N, int W>
    static constexpr int kVectors = 1;
    template <int N, int W>
    static void store(const Sum (&digits)[N], float* out) {
        Vec all = as_floats(raise(digits[0]) + digits[1]);
        if (N == 3)
            all = fma(all, Vec::set(256), as_floats(digits[N - 1]));
        (Vec::load(out) + all).store(out);
    }
};

// Like multiply_byte_lanes for int8, but only for whole blocks of columns; returns how many columns were
// done.
template <int N>
inline int64_t multiply_digit_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                    int64_t os) {
    const int64_t wide = x.in_lanes - x.in_narrow, groups = ceil_div(wide, kLaneGroup);
    const int64_t whole = (end - begin) / kLaneRows * kLaneRows;
    const ByteRoom room(m, N);
    const auto* codes = static_cast<const uint8_t*>(m.planes[kCodes]) + begin * m.inputs;
    alignas(64) float blocks[ceil_div(kFewRows, kLaneGroup) + 1][2 * kLaneRows][kLaneGroup];
    const auto add = [&](auto lanes, int64_t g, const uint8_t* w, const uint8_t* next, int64_t k, int64_t n,
                         float* block) {
        constexpr int W = decltype(lanes)::value;
        lanes_block<DigitsInLanes, N, W>(x.byte_lanes + g * room.digits + k * (kLaneGroup / W), x.lanes_apart,
                                         w + k, m.inputs, n, block,
                                         x.starts + g * room.starts + k / kBytesDeep * N * kLaneGroup, next);
    };
    for (int64_t c = 0; c < whole; c += 2 * kLaneRows, out += 2 * kLaneRows) {
        const int64_t columns = least(2 * kLaneRows, whole - c);
        std::memset(blocks, 0, sizeof(blocks));
        for (int64_t half = 0; half < columns; half += kLaneRows) {
            const uint8_t* w = codes + (c + half) * m.inputs;
            for (int64_t k = 0; k < m.inputs; k += kBytesDeep) {
                const int64_t n = least(kBytesDeep, m.inputs - k);
                const uint8_t* next = w + 2 * kLaneRows * m.inputs + k * kLaneRows; // after the next block
                for (int64_t g = 0; g < groups; ++g)
                    add(std::integral_constant<int, 1>(), g, w, next, k, n, blocks[g][half]);
                if (x.in_narrow)
                    add(std::integral_constant<int, 2>(), groups, w, next, k, n, blocks[groups][half]);
            }
        }
        for (int64_t g = 0; g < groups + (x.in_narrow > 0); ++g) {
            const Vec units = Vec::load(x.units + g * kLaneGroup) * Vec::set(BytesOfInt8::kUnit);
            for (auto& column : blocks[g])
                (Vec::load(column) * units).store(column);
            if (g < groups)
                turn_lanes<1, 1>(blocks[g][0], least(kLaneGroup, wide - g * kLaneGroup), columns,
                                 out + g * kLaneGroup * os, os);
            else
                turn_lanes<1, 2>(blocks[g][0], x.in_narrow, columns, out + wide * os, os);
        }
    }
    return whole;
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's multiplier, for all rows in
// lanes.
template <class F, int N, bool kMinima>
inline void multiply_byte_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                int64_t os) {
    if constexpr (std::is_same<F, BytesOfInt8>::value) {
        const int64_t done = multiply_digit_lanes<N>(x, m, begin, end, out, os);
        begin += done, out += done;
        if (begin == end)
            return;
    }
    const int64_t wide = x.in_lanes - x.in_narrow;
    int64_t r = 0, g = 0;
    for (; N <= 2 && wide - r > kLaneGroup; r += 2 * kLaneGroup, g += 2)
        bytes_rows<F, 2, 1, least(N, 2), kMinima>(x, m, g, least(2 * kLaneGroup, wide - r), begin, end,
                                                  out + r * os, os);
    for (; r < wide; r += kLaneGroup, ++g)
        bytes_rows<F, 1, 1, N, kMinima>(x, m, g, least(kLaneGroup, wide - r), begin, end, out + r * os, os);
    if (x.in_narrow)
        bytes_rows<F, 1, 2, N, kMinima>(x, m, g, x.in_narrow, begin, end, out + wide * os, os);
}
#endif

#endif

} // namespace
} // namespace slipstream
