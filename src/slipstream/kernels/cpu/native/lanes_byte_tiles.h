// Groups of sixteen rows, as integers in digits, times a packed matrix with integer codes, by AMX tiles.
// Digits in lanes have the layout of tiles, and so have int8 codes; other codes are unpacked to bytes first,
// some inputs of sixteen rows at a time. Sums are exact in int32 until they are multiplied by a scale.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kByteBand = 16; // rows of the matrix in a tile

// The codes of some inputs of a band, the scale and offset of each of their groups, and sums of products.
struct ByteBand {
    static constexpr int64_t kTogether = 8; // groups whose sums are multiplied by their scales together
    alignas(64) uint8_t codes[kBytesDeep / 64][kByteBand][64];
    alignas(64) float scales[kByteBand][16], middles[kByteBand][16];
    alignas(64) int32_t sums[kTogether][3][kByteBand][kLaneGroup];
};

// A group of rows of x in lanes, from some input on, with its start values and sums: see ByteRoom.
struct ByteGroup {
    const uint8_t* digits;
    int64_t apart; // bytes between digits
    const int32_t* starts;
    const float* sums;
};

// The sums of B bands in N digits; the first accumulator is tile T.
template <int B, int N, int T>
struct DigitTiles {
    static_assert(T + B * N <= 4, "the others are of codes and digits");

    template <int I = 0>
    static void start(const int32_t* starts) {
        tile_load<T + I>(starts + I % N * kLaneGroup, 0); // all rows are the same
        if constexpr (I + 1 < B * N)
            start<I + 1>(starts);
    }
    template <int I = 0>
    static void zero() {
        tile_zero<T + I>();
        if constexpr (I + 1 < B * N)
            zero<I + 1>();
    }
    // Adds the products of as many inputs as a tile has.
    static void add(const uint8_t* codes, int64_t pitch, const ByteGroup& x, int64_t i) {
        tile_load<6>(codes, pitch);
        if constexpr (B > 1)
            tile_load<7>(codes + kByteBand * pitch, pitch);
        dots(x.digits + i * kLaneGroup, x.apart);
    }
    template <int I = 0>
    static void store(int32_t (*sums)[3][kByteBand][kLaneGroup]) {
        tile_store<T + I>(sums[I / N][I % N], sizeof(sums[0][0][0]));
        if constexpr (I + 1 < B * N)
            store<I + 1>(sums);
    }

private:
    template <int I = 0>
    static void dots(const uint8_t* digits, int64_t apart) {
        tile_load<4 + I % 2>(digits + I * apart, 64);
        tile_dot_digits<T + I, 6, 4 + I % 2>();
        if constexpr (B > 1)
            tile_dot_digits<T + N + I, 7, 4 + I % 2>();
        if constexpr (I + 1 < N)
            dots<I + 1>(digits, apart);
    }
};

// The sums of row j, combined from N digits.
template <int N>
inline Vec whole_sums(const int32_t (*digits)[kByteBand][kLaneGroup], int64_t j) {
    CodeSums parts[N];
    for (int n = 0; n < N; ++n)
        std::memcpy(&parts[n], digits[n][j], sizeof(parts[n]));
    Vec all = as_floats(N == 1 ? parts[0] : raise(parts[0]) + parts[N > 1]);
    for (int n = 2; n < N; ++n)
        all = fma(all, Vec::set(256), as_floats(parts[n]));
    return all;
}

// totals[j] += the sums of some groups, from group `first` of the band on, times their scales, plus the
// contribution of the minima.
template <int N, bool kMinima>
inline void settle_groups(const ByteBand& band, int64_t first, int64_t groups, const float* group_sums,
                          float (*totals)[kLaneGroup]) {
    constexpr int R = 4; // independent chains of additions
    for (int64_t j = 0; j < kByteBand; j += R) {
        Vec sums[R], less[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            sums[r] = Vec::load(totals[j + r]), less[r] = Vec::set(0);
        for (int64_t g = 0; g < groups; ++g) {
            const Vec inputs = kMinima ? Vec::load(group_sums + g * kLaneGroup) : Vec::set(0);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                sums[r] =
                    fma(whole_sums<N>(band.sums[g], j + r), Vec::set(band.scales[j + r][first + g]), sums[r]);
                if (kMinima)
                    less[r] = fma(inputs, Vec::set(band.middles[j + r][first + g]), less[r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            (kMinima ? sums[r] + less[r] : sums[r]).store(totals[j + r]);
    }
}

// totals[j] += `inputs` inputs of row j of a band times the rows of x, for a format with a scale per span.
// All products come first and all scales after them: a tile load waits for a recent store to the same offset
// within a page, which most would do if the two alternated.
template <int N, bool kMinima>
[[gnu::noinline]] void add_spans(const ByteGroup& x, ByteBand& band, int64_t inputs, int64_t span,
                                 float (*totals)[kLaneGroup]) {
    constexpr int kOther = N < 3 ? N : 0; // the sums of the next group do not depend on those of this one
    const int64_t groups = ceil_div(inputs, span), step = least(span, 64);
    const auto tiles = [&](auto first, int64_t g, int64_t at) {
        using Tiles = DigitTiles<1, N, decltype(first)::value>;
        if (kMinima)
            Tiles::zero();
        else
            Tiles::start(x.starts + g * N * kLaneGroup);
        for (int64_t i = g * span; i < least((g + 1) * span, inputs); i += step)
            Tiles::add(band.codes[i / 64][0] + i % 64, 64, x, i);
        Tiles::store(band.sums + at);
    };
    for (int64_t g = 0; g < groups; g += ByteBand::kTogether) {
        const int64_t some = least(ByteBand::kTogether, groups - g);
        for (int64_t i = 0; i < some; i += 2) {
            tiles(std::integral_constant<int, 0>(), g + i, i);
            if (i + 1 < some)
                tiles(std::integral_constant<int, kOther>(), g + i + 1, i + 1);
        }
        settle_groups<N, kMinima>(band, g, some, x.sums + g * kLaneGroup, totals);
    }
}

// totals[j] += `inputs` inputs of row j of B bands of int8 times the rows of x. Rows lie `pitch` bytes apart,
// and consecutive blocks of 64 inputs `apart` bytes. Prefetches lines from `coming` on along the way.
template <int B, int N>
[[gnu::noinline]] void add_lines(const ByteGroup& x, ByteBand& band, const uint8_t* codes, int64_t pitch,
                                 int64_t apart, int64_t inputs, const uint8_t* coming,
                                 float (*totals)[kLaneGroup]) {
    // alternate between two sets, so that no product waits for the previous one
    constexpr int kSets = 2 * B * N > 4 ? 1 : 2;
    using Even = DigitTiles<B, N, 0>;
    using Odd = DigitTiles<B, N, (kSets - 1) * B * N>;
    constexpr int64_t kRows = B * kByteBand;
    const auto ask = [&] {
        for (int64_t line = 0; coming && line < kRows; ++line)
            prefetch(coming + 64 * line);
        coming += coming ? 64 * kRows : 0;
    };
    Even::zero();
    Odd::zero();
    int64_t i = 0;
    for (; i + 64 < inputs; i += 128, codes += 2 * apart) {
        ask();
        Even::add(codes, pitch, x, i);
        ask();
        Odd::add(codes + apart, pitch, x, i + 64);
    }
    if (i < inputs) {
        ask();
        Even::add(codes, pitch, x, i);
    }
    Even::store(band.sums);
    if (kSets == 2)
        Odd::store(band.sums + B);
    for (int64_t j = 0; j < kRows; ++j) {
        Vec sum = Vec::load(totals[j]);
        for (int set = 0; set < kSets; ++set)
            sum = sum + whole_sums<N>(band.sums[set * B + j / kByteBand], j % kByteBand);
        sum.store(totals[j]);
    }
}

// Unpacks inputs [k, k + n) of rows of the matrix from o on; if fewer than sixteen rows are left, the last
// one is repeated. Prefetches what follows the sixteen rows in memory.
template <class F>
inline void fill_band(const Matrix& m, const PackedRows& all, int64_t o, int64_t columns, int64_t k,
                      int64_t n, ByteBand& band) {
    const auto behind = [&](const uint8_t* codes, int64_t of_byte) {
        const int64_t at = (o + kByteBand) * (m.inputs / of_byte) + k * (kByteBand / of_byte);
        return codes ? codes + at : nullptr;
    };
    const PackedRow first = all.row(0);
    const uint8_t *codes = behind(first.codes, F::kCodesOfByte), *crumbs = behind(first.crumbs, 4);
    for (int64_t j = 0; j < kByteBand; ++j) {
        const PackedRow row = all.row(o + least(j, columns - 1));
        for (int64_t b = 0; b < n / F::kCodesOfByte; b += 64, codes += 64)
            prefetch(codes);
        for (int64_t b = 0; crumbs && b < n / 4; b += 64, crumbs += 64)
            prefetch(crumbs);
        F::bring(row, k, n, band.codes[0][j], sizeof(band.codes[0]));
        if constexpr (F::kScales)
            bring_scales<F>(m, row, k, n, band.scales[j], band.middles[j]);
    }
}

// Multiplies a group of rows in lanes of N digits with inputs [k, k + n) of a band of the matrix, or of two
// bands if int8 codes are read in place: `there` is their address, else null.
template <class F, int N, bool kMinima>
inline void add_group(const ByteGroup& x, const Matrix& m, ByteBand& band, const uint8_t* there,
                      int64_t bands, int64_t n, const uint8_t* coming, float (*totals)[kLaneGroup]) {
    if constexpr (F::kScales) {
        add_spans<N, kMinima>(x, band, n, lane_span(m), totals);
    } else {
        constexpr int kTwo = N < 3 ? 2 : 1;
        if (there && bands == kTwo)
            add_lines<kTwo, N>(x, band, there, m.inputs, 64, n, coming, totals);
        else if (there)
            add_lines<1, N>(x, band, there, m.inputs, 64, n, coming, totals);
        else
            add_lines<1, N>(x, band, band.codes[0][0], 64, sizeof(band.codes[0]), n, nullptr, totals);
    }
}

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's multiplier, for all rows in
// lanes.
template <class F, int N, bool kMinima>
inline void multiply_byte_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                int64_t os) {
    constexpr int64_t kMostGroups = kFewRows / kLaneGroup + 1;
    const int64_t span = lane_span(m), wide = x.in_lanes - x.in_narrow, whole = ceil_div(wide, kLaneGroup);
    // rows of two digits have a lane for each digit; other narrow rows use vectors
    constexpr bool kPairs = N == 2;
    const int64_t groups = whole + (kPairs && x.in_narrow > 0);
    if constexpr (!kPairs && F::kScales)
        if (x.in_narrow)
            bytes_rows<F, 1, 2, N, kMinima>(x, m, whole, x.in_narrow, begin, end, out + wide * os, os);
    if (!groups)
        return;
    const bool lie = !F::kScales && m.inputs % 64 == 0;
    const PackedRows all(m);
    const ByteRoom room(m, N);
    const TileSession session(least(span, 64));
    ByteBand band;
    alignas(64) float totals[kMostGroups][2 * kByteBand][kLaneGroup];
    for (int64_t o = begin, bands = 1; o < end; o += bands * kByteBand) {
        bands = lie && N < 3 && end - o >= 2 * kByteBand ? 2 : 1;
        const int64_t columns = least(bands * kByteBand, end - o);
        const bool here = lie && columns == bands * kByteBand;
        std::memset(totals, 0, static_cast<size_t>(groups) * sizeof(totals[0]));
        for (int64_t k = 0; k < m.inputs; k += kBytesDeep) {
            const int64_t n = least(kBytesDeep, m.inputs - k), at = k / span * kLaneGroup;
            const uint8_t* there = here ? all.row(o).codes + k : nullptr;
            const uint8_t* coming = all.row(o + columns).codes + columns * k;
            if (!here)
                fill_band<F>(m, all, o, columns, k, n, band);
            for (int64_t g = 0; g < groups; ++g) {
                const uint8_t* digits = x.byte_lanes + g * room.digits + k * kLaneGroup;
                const int32_t* starts = x.starts + g * room.starts;
                const float* sums = x.lane_sums + g * room.sums + at;
                const uint8_t* next = g == 0 ? coming : nullptr;
                if (g < whole)
                    add_group<F, N, kMinima>({digits, x.lanes_apart, starts + at * N, sums}, m, band, there,
                                             bands, n, next, totals[g]);
                else if constexpr (kPairs)
                    add_group<F, 1, kMinima>({digits, 0, starts + at, sums}, m, band, there, bands, n, next,
                                             totals[g]);
            }
        }
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t first = g * kLaneGroup;
            const Vec units = Vec::load(x.units + first) * Vec::set(F::kUnit);
            for (int64_t j = 0; j < bands * kByteBand; ++j)
                (Vec::load(totals[g][j]) * units).store(totals[g][j]);
            for (int64_t j = 0; j < columns; j += kByteBand) {
                const int64_t some = least(kByteBand, columns - j);
                float* to = out + first * os + o - begin + j;
                if (g < whole)
                    turn_lanes<1>(totals[g][j], least(kLaneGroup, wide - first), some, to, os);
                else
                    turn_lanes<1, 2>(totals[g][j], x.in_narrow, some, to, os);
            }
        }
    }
}

} // namespace
} // namespace slipstream
