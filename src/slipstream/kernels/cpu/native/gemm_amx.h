// Panels of AMX. A product of tiles takes sixteen rows of the matrix, with one line of inputs each (32 of
// bfloat16 or 64 bytes), in row order, and the same inputs of sixteen tokens in their packed order: one line
// of a group is a tile.
//
// panel    [band of 16 rows][line][row in band][inputs of a line]      each tile is contiguous
//
// Four tiles hold the sums, of two bands by two groups of tokens or of four bands by one, over all lines of a
// panel at once. Measured on an Emerald Rapids that reaches 2.8 TFLOP/s with all operands in registers, in
// TFLOP/s, tiles from the second-level cache, two bands by two groups; either some lines at a time for four
// such blocks, so that tokens stay in the first-level cache, or all lines at once: 64 lines in parts of 8
// 1.65 and all at once 1.90, in parts of 16 1.67; 18 lines in parts of 9 1.74 and all at once 1.84. A tile of
// sums takes 23 cycles to load and 45 to store, a product 16.
//
// All bands of a panel are processed before the first one is used again, while the tokens stay the same.
// Bands are therefore loaded with a hint that they need not stay in the first-level cache, which has room for
// two groups of tokens of up to 20 lines.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TILELOADDT1.
#pragma once

namespace slipstream {
namespace {

struct TileWord : Bf16Word {
    // All tokens are read again for each panel, from the third-level cache if they do not fit into the
    // second: wide panels, of half the second-level cache, reduce that. Tested with tiles emulated by vectors
    // with as many loads and cycles, and half of a Zen 5's second-level cache: 512 tokens of SmolLM2 take 49
    // ms, and 54 ms with panels of 128 rows.
    static constexpr int64_t kPanelRows = 512; // as long as kPanelBytes suffice
    static constexpr int64_t kPanelBytes = 1 << 20;
    static constexpr int64_t kDeepRows = 128; // minimum rows of a panel, whatever its depth
    static constexpr int64_t kGroups = 2;
    static constexpr int64_t kBlock = 32; // rows of a block of tiles
    template <int C, int A, int B>
    static void multiply() {
        tile_dot_bf16<C, A, B>();
    }
};

struct ByteTileWord : ByteWord {
    static constexpr int64_t kPanelRows = TileWord::kPanelRows;
    static constexpr int64_t kPanelBytes = TileWord::kPanelBytes;
    static constexpr int64_t kDeepRows = TileWord::kDeepRows;
    static constexpr int64_t kGroups = TileWord::kGroups;
    static constexpr int64_t kBlock = TileWord::kBlock;
    template <int C, int A, int B>
    static void multiply() {
        tile_dot_codes<C, A, B>();
    }
};

template <class U>
struct TilePanel {
    using Item = typename U::Item;
    using Session = TileSession;
    static constexpr bool kStarts = false;                        // sums start at zero
    static constexpr int64_t kBand = 16, kLine = line_items<U>(); // rows of a tile, and items per row of it
    static constexpr int64_t kTile = kBand * kLine;
    static int64_t pitch(int64_t deep) { return deep; } // rows of a band are interleaved by lines

    static const Item* here(const Matrix&, int64_t, int64_t, int64_t, int64_t, int64_t*) { return nullptr; }

    static void bring(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n, Item* panel,
                      int64_t pitch) {
        constexpr int64_t kInputs = 512, kWide = kInputs + kLine;
        int64_t apart = 0;
        const Item* there = rows % kBand ? nullptr : RowPanel<U>::here(m, begin, rows, from, n, &apart);
        alignas(64) Item part[kBand * kWide];
        for (int64_t r = 0; r < rows; r += kBand, panel += kBand * pitch) {
            if (there) {
                copy_tiles(there + r * apart, apart, n, panel);
                continue;
            }
            const int64_t count = least(kBand, rows - r);
            if (count < kBand)
                std::memset(static_cast<void*>(part), 0, sizeof(part));
            for (int64_t k = 0; k < n; k += kInputs) {
                const int64_t inputs = least(kInputs, n - k);
                fill_rows<U>(m, begin + r, count, from + k, inputs, part, kWide);
                copy_tiles(part, kWide, inputs, panel + k * kBand);
            }
        }
    }

    // Return the number of steps of a pass in which a part of the following data is prefetched: one per line
    // of each block. Prefetching once per block would delay the block's own loads (512 tokens of 2048 x 2048:
    // 2.69 ms, instead of 2.56 ms).
    static int64_t blocks(int64_t rows, int64_t words) {
        return ceil_div(rows, 2 * kBand) * (words / kGroup);
    }

    static void multiply(const Pass<Item>& p) {
        const int64_t bands = ceil_div(p.rows, kBand);
        if (p.groups == 2)
            wide(p, bands);
        else
            tall(p, bands);
    }

private:
    // Copy the inputs of a band, whose rows are `apart` items from each other, into tiles; the last line is
    // whole.
    static void copy_tiles(const Item* from, int64_t apart, int64_t inputs, Item* to) {
        for (int64_t k = 0; k < inputs; k += kLine, to += kTile)
            for (int64_t i = 0; i < kBand; ++i)
                std::memcpy(to + i * kLine, from + i * apart + k, sizeof(Item) * kLine);
    }

    static void wide(const Pass<Item>& p, int64_t bands) {
        int64_t band = 0;
        for (; band + 2 <= bands; band += 2)
            block<2, 2>(p, band);
        if (band < bands)
            block<1, 2>(p, band);
    }

    static void tall(const Pass<Item>& p, int64_t bands) {
        int64_t band = 0;
        for (; band + 4 <= bands; band += 4)
            block<4, 1>(p, band);
        if (bands - band == 3)
            block<3, 1>(p, band);
        else if (bands - band == 2)
            block<2, 1>(p, band);
        else if (bands - band == 1)
            block<1, 1>(p, band);
    }

    // R bands by S groups. Tiles 0 to 3 hold the sums, 4 and 5 tokens, 6 and 7 rows of the matrix.
    template <int R, int S>
    static void block(const Pass<Item>& p, int64_t band) {
        const Item* w = p.panel + band * kBand * p.pitch;
        float* c = p.c + band * kBand * p.stride;
        each_sum<R, S>(c, p.stride, p.first, false);
        for (int64_t line = 0; line < p.words / kGroup; ++line) {
            p.ahead->some();
            tile_load<4>(p.x + line * kTile, 64);
            if constexpr (S > 1)
                tile_load<5>(p.x + p.group + line * kTile, 64);
            row<R, S, 0>(w + line * kTile, kBand * p.pitch);
        }
        each_sum<R, S>(c, p.stride, false, true);
    }

    template <int R, int S, int I>
    static void row(const Item* w, int64_t band) {
        tile_stream<6 + I % 2>(w + I * band, 64);
        U::template multiply<I * S, 6 + I % 2, 4>();
        if constexpr (S > 1)
            U::template multiply<I * S + 1, 6 + I % 2, 5>();
        if constexpr (I + 1 < R)
            row<R, S, I + 1>(w, band);
    }

    // Initialize the sums with zeros or from c, or (`back`) store them there.
    template <int R, int S, int I = 0>
    static void each_sum(float* c, int64_t stride, bool zero, bool back) {
        float* at = c + I / S * kBand * stride + I % S * kGroup;
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
        if (back)
            tile_store<I>(at, bytes);
        else if (zero)
            tile_zero<I>();
        else
            tile_load<I>(at, bytes);
        if constexpr (I + 1 < R * S)
            each_sum<R, S, I + 1>(c, stride, zero, back);
    }
};

} // namespace
} // namespace slipstream
