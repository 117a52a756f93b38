// Attention with AMX tiles, sixteen rows at a time. Fewer rows are padded with rows whose results are unused:
// vectors take as long for only two rows.
#pragma once

namespace slipstream {
namespace {

struct TileSlots : PairSlots {
    using Session = TileSession;
    static constexpr int64_t kSlots = 16, kKeys = 32, kStripRows = 16;

    template <bool kAdd>
    static void multiply(const float* a, int64_t as, int64_t rows, const float* b, int64_t bs, int64_t depth,
                         int64_t width, float* out, int64_t os) {
        if (rows < 2) {
            PairSlots::multiply<kAdd>(a, as, rows, b, bs, depth, width, out, os);
            return;
        }
        int64_t j = 0;
        for (; j + 64 <= width; j += 64)
            some<kAdd, 4>(a, as, rows, b + j, bs, depth, out + j, os);
        if (width - j == 48)
            some<kAdd, 3>(a, as, rows, b + j, bs, depth, out + j, os);
        else if (width - j == 32)
            some<kAdd, 2>(a, as, rows, b + j, bs, depth, out + j, os);
        else if (width - j == 16)
            some<kAdd, 1>(a, as, rows, b + j, bs, depth, out + j, os);
    }

private:
    static constexpr int64_t kFloat = sizeof(float);

    // Padding rows are read; without kAdd they are also overwritten, with kAdd their sums go to a separate
    // buffer.
    template <bool kAdd, int C>
    static void some(const float* a, int64_t as, int64_t rows, const float* b, int64_t bs, int64_t depth,
                     float* out, int64_t os) {
        if (!kAdd || rows == kStripRows)
            return columns<kAdd, C>(a, as, b, bs, depth, out, os);
        alignas(64) float part[kStripRows * C * 16];
        columns<false, C>(a, as, b, bs, depth, part, C * 16);
        for (int64_t r = 0; r < rows; ++r, out += os)
            for (int64_t j = 0; j < C * 16; j += Vec::kWidth)
                (Vec::load(out + j) + Vec::load(part + r * C * 16 + j)).store(out + j);
    }

    // Sixteen rows by C * 16 columns: tiles 0 to 3 hold the sums, tile 4 the rows, tiles 5 and 6 the columns.
    template <bool kAdd, int C>
    static void columns(const float* a, int64_t as, const float* b, int64_t bs, int64_t depth, float* out,
                        int64_t os) {
        begin<kAdd, C>(out, os * kFloat);
        for (int64_t k = 0; k < depth; k += kSlots) {
            tile_load<4>(a + k, as * kFloat);
            step<C>(b + k * bs, bs * kFloat);
        }
        end<C>(out, os * kFloat);
    }

    template <bool kAdd, int C, int I = 0>
    static void begin(const float* out, int64_t bytes) {
        if constexpr (kAdd)
            tile_load<I>(out + I * 16, bytes);
        else
            tile_zero<I>();
        if constexpr (I + 1 < C)
            begin<kAdd, C, I + 1>(out, bytes);
    }

    template <int C, int I = 0>
    static void step(const float* b, int64_t bytes) {
        tile_load<5 + I % 2>(b + I * 16, bytes);
        tile_dot_bf16<I, 4, 5 + I % 2>();
        if constexpr (I + 1 < C)
            step<C, I + 1>(b, bytes);
    }

    template <int C, int I = 0>
    static void end(float* out, int64_t bytes) {
        tile_store<I>(out + I * 16, bytes);
        if constexpr (I + 1 < C)
            end<C, I + 1>(out, bytes);
    }
};

} // namespace
} // namespace slipstream
