// Groups of rows in words times a packed matrix whose codes are whole numbers: those of some of its rows are
// brought into the first cache as words once, where several at a time meet the same two inputs of a group of
// rows. Sums are exact in int32 until they are multiplied by a scale. A few rows are multiplied so, and by
// panels (gemm_words.h) many.
//
// Measured on a Zen 3 with AVX2, one thread, 576 x 1536 out of memory, beside weights that became float32:
// eight rows of int8 take 0.75 of the time, of int4 0.44 and of fp6 0.35; two rows of int4 0.44.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// Rows of the matrix that lie in the first cache together.
constexpr int64_t kWordTile = most(8, kWordGroup);

// Codes of inputs [k, k + n) of a row as words, zeros behind the inputs; n is a multiple of kWordStep. Of
// formats with groups what goes with each span follows in float32: the scales of all, then what is added for
// each of their inputs.
class CodeWords {
public:
    CodeWords(const Matrix& m, int64_t span)
        : m_(m), rows_(m), span_(span), per_group_(m.group / span),
          there_(m.group ? ceil_div(m.inputs, m.group) * m.group : m.inputs) {}

    void bring(int64_t o, int64_t k, int64_t n, int16_t* to) const {
        const PackedRow row = rows_.row(o);
        const int64_t whole = most(0, least(n, there_ - k));
        std::memset(to + whole, 0, static_cast<size_t>(n - whole) * sizeof(*to));
        if (m_.format == kInt8)
            return bring_int8(reinterpret_cast<const int8_t*>(row.codes) + k, whole, to);
        float unit = 1;
        if (m_.format == kFp6E2m3) {
            unit = SixesOfBytes::kUnit;
            bring_blocks<SixesOfBytes>(row, k, whole, to);
        } else {
            bring_blocks<HalvesOfBytes>(row, k, whole, to);
        }
        bring_numbers(o, row, k, n, unit, reinterpret_cast<float*>(to + n));
    }

private:
    static void bring_int8(const int8_t* from, int64_t n, int16_t* to) {
        int64_t j = 0;
        for (; j + 64 <= n; j += 64) {
#pragma GCC unroll 8
            for (int i = 0; i < 64; i += Words::kWidth)
                Words::load(from + j + i).store(to + j + i);
        }
        for (; j < n; ++j)
            to[j] = from[j];
    }

    template <class F>
    static void bring_blocks(const PackedRow& row, int64_t k, int64_t n, int16_t* to) {
        for (int64_t j = 0; j < n; j += F::kInputs) {
            const int64_t block = (k + j) / F::kInputs;
            if (row.crumbs && j % 256 == 0)
                prefetch(row.crumbs + (k + j) / 4 + kPackedAhead / 2);
            Words codes[F::kWords];
            F::load(row, block, codes);
#pragma GCC unroll 8
            for (int w = 0; w < F::kWords; ++w)
                codes[w].store(to + j + w * Words::kWidth);
        }
    }

    // What lies behind `to` may be overwritten, up to a vector.
    void bring_numbers(int64_t o, const PackedRow& row, int64_t k, int64_t n, float unit, float* to) const {
        const int64_t spans = ceil_div(n, span_), first = k / span_;
        const int64_t there = most(0, least(spans, there_ / span_ - first));
        const bool beyond = (m_.outputs - o) * (there_ / m_.group) >= first + there + Vec::kWidth;
        const auto copy = [&](const Half* from, float factor, float* out) {
            int64_t j = 0;
            for (; per_group_ > 1 && j < there; ++j)
                out[j] = widen_one(from + (first + j) / per_group_) * factor;
            for (; j < there; j += Vec::kWidth) {
                const int64_t some = least(there - j, Vec::kWidth);
                const Half* at = from + first + j;
                ((beyond ? Vec::load(at) : Vec::load(at, some)) * Vec::set(factor)).store(out + j);
            }
            for (j = there; j < spans; ++j)
                out[j] = 0;
        };
        copy(row.scales, unit, to);
        if (row.minima)
            copy(row.minima, 1, to + spans);
        else
            copy(row.scales, is_int4(m_) ? -8 : 0, to + spans);
    }

    const Matrix& m_;
    PackedRows rows_;
    int64_t span_, per_group_; // spans of a group
    int64_t there_;            // inputs that the planes have
};

// Some rows of codes, as CodeWords has them, times groups of rows, as WordRows has them.
struct WordPass {
    const int16_t* codes;
    int64_t pitch, inputs; // words between rows; inputs of each
    const int16_t* x;
    int64_t group, span, apart; // words between groups; inputs of a span, and words between spans
    bool first;                 // c is written, not added to
    float* c;
    int64_t stride;
    Ahead* ahead;
};

// c[r][s] = what it holds, or where `first` zero, plus R rows of codes, from `row` on, times S groups.
template <int R, int S, int W, bool kNumbers>
[[gnu::noinline]] void words_block(const WordPass& p, int64_t row) {
    constexpr int kSteps = S == 1 ? 4 : 1; // one group of rows has few products in a step
    const int16_t *w = p.codes + row * p.pitch, *x = p.x;
    const auto* numbers = reinterpret_cast<const float*>(w + p.inputs);
    const int64_t pitch = p.pitch, group = p.group, spans = ceil_div(p.inputs, p.span);
    float* c = p.c + row * p.stride;
    // Beside each other, for there are no registers to find them by.
    alignas(64) float totals[R][S][kWordGroup];
    const auto each_total = [&](auto f) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                f(r, s, totals[r][s]);
    };
    each_total([&](int r, int s, float* to) {
        (p.first ? Vec::set(0) : Vec::load(c + r * p.stride + s * kWordGroup)).store(to);
    });
    for (int64_t k = 0; k < p.inputs; k += p.span, w += p.span, x += p.apart, ++numbers) {
        PairSums sums[R][S];
        each_total([&](int r, int s, float*) { sums[r][s] = PairSums::of(Vec::set(0)); });
        p.ahead->some();
        const int16_t *at = x, *codes = w;
        for (int64_t left = least(p.span, p.inputs - k); left > 0; left -= 2 * W * kSteps) {
#pragma GCC unroll 4
            for (int step = 0; step < kSteps; ++step, codes += 2 * W, at += 2 * kWordGroup) {
                WordPairs lanes[S];
#pragma GCC unroll 16
                for (int s = 0; s < S; ++s)
                    lanes[s] = WordPairs::load(at + s * group);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const WordPairs some = WordPairs::spread<W>(codes + r * pitch);
#pragma GCC unroll 16
                    for (int s = 0; s < S; ++s)
                        sums[r][s] = dot(sums[r][s], lanes[s], some);
                }
            }
        }
        const auto* of_rows = reinterpret_cast<const float*>(x + p.span * (kWordGroup / W));
        each_total([&](int r, int s, float* to) {
            Vec total = Vec::load(to);
            if constexpr (kNumbers) {
                const float* here = numbers + r * (pitch / 2);
                total = fma(sums[r][s].floats(), Vec::repeat(here), total);
                total = fma(Vec::load(of_rows + s * (group / 2)), Vec::repeat(here + spans), total);
            } else {
                total = total + sums[r][s].floats();
            }
            total.store(to);
        });
    }
    each_total(
        [&](int r, int s, const float* from) { Vec::load(from).store(c + r * p.stride + s * kWordGroup); });
}

// Rows of a tile and groups of rows of x that registers hold the sums of, and lanes of each of those.
template <int R, int S, int W>
struct WordShape {
    static constexpr int kRows = R, kGroups = S, kLanes = W;
};

// c[r * stride + g * kWordGroup] on = row r of a tile times group g of the rows of x, from input k on.
template <bool kNumbers>
inline void words_tile(const WordLanes& lanes, const int16_t* x, int64_t k, WordPass p) {
    const int64_t wide = ceil_div(lanes.wide, kWordGroup), spans = k / lanes.span;
    float* c = p.c;
    const auto run = [&](int64_t g, auto shape) {
        constexpr int R = decltype(shape)::kRows, S = decltype(shape)::kGroups, W = decltype(shape)::kLanes;
        p.apart = lanes.span * (kWordGroup / W) + (kNumbers ? kWordSums : 0);
        p.x = x + g * p.group + spans * p.apart;
        p.c = c + g * kWordGroup;
        for (int64_t r = 0; r < kWordTile; r += R)
            words_block<R, S, W, kNumbers>(p, r);
    };
    int64_t g = 0;
    for (; g + 3 <= wide; g += 3)
        run(g, WordShape<4, 3, 1>());
    if (g + 2 <= wide) {
        run(g, WordShape<4, 2, 1>());
        g += 2;
    }
    if (g < wide)
        run(g, WordShape<8, 1, 1>());
    if (lanes.lanes == 2)
        run(wide, WordShape<8, 1, 2>());
    else if (lanes.lanes == 4)
        run(wide, WordShape<8, 1, 4>());
}

// out[i * os + j] = row i of `count` rows, each in W lanes of c, of `columns` rows of a tile.
template <int W>
inline void turn_words(const float* c, int64_t stride, int64_t count, int64_t columns, const float* units,
                       float* out, int64_t os) {
    for (int64_t j = 0; j < columns; j += kWordGroup) {
        Vec v[kWordGroup];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kWordGroup; ++i)
            v[i] = Vec::load(c + (j + i) * stride);
        transpose(v);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kWordGroup / W; ++i) {
            if (i >= count)
                break;
            Vec row = v[i * W];
            for (int64_t l = 1; l < W; ++l)
                row = row + v[i * W + l];
            (row * Vec::set(units[i])).store(out + i * os + j, least(kWordGroup, columns - j));
        }
    }
}

// out[r * os + o - begin] = row r . row o of a packed matrix, before its multiplier.
inline void multiply_word_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                int64_t os) {
    constexpr int64_t kDeep = 6 * kWordSpan;                // as a tile has
    constexpr int64_t kPitch = kDeep + kDeep / 32 * 4 + 32; // no power of two
    constexpr int64_t kMostGroups = ceil_div(kFewRows, kWordGroup) + 1;
    alignas(64) int16_t tile[kWordTile * kPitch];
    alignas(64) float c[kWordTile * kMostGroups * kWordGroup];
    const WordLanes lanes(m, x.rows.count);
    const CodeWords codes(m, lanes.span);
    const int64_t wide = ceil_div(lanes.wide, kWordGroup), stride = lanes.groups() * kWordGroup;
    const int64_t width = word_inputs(m.inputs), row_bytes = m.plane_bytes[kCodes] / m.outputs;
    const int64_t tile_bytes = kWordTile * row_bytes, spans = ceil_div(width, lanes.span);
    const int64_t ahead_by = ceil_div(kPackedAhead, tile_bytes) * tile_bytes;
    for (int64_t o = begin; o < end; o += kWordTile, out += kWordTile) {
        const int64_t columns = least(kWordTile, end - o);
        const char* coming = static_cast<const char*>(m.planes[kCodes]) + o * row_bytes + ahead_by;
        Ahead ahead = {coming, coming + tile_bytes, tile_bytes / 64 / spans + 1};
        for (int64_t k = 0; k < width; k += kDeep) {
            const int64_t deep = least(kDeep, width - k);
            for (int64_t r = 0; r < kWordTile; ++r) // beyond the last row that one again
                codes.bring(o + least(r, columns - 1), k, deep, tile + r * kPitch);
            const WordPass pass = {tile, kPitch, deep, nullptr, lanes.group, lanes.span,
                                   0,    k == 0, c,    stride,  &ahead};
            if (lanes.numbers)
                words_tile<true>(lanes, x.words, k, pass);
            else
                words_tile<false>(lanes, x.words, k, pass);
        }
        for (int64_t g = 0; g < wide; ++g) {
            const int64_t r = g * kWordGroup;
            turn_words<1>(c + r, stride, least(kWordGroup, lanes.wide - r), columns, x.units + r,
                          out + r * os, os);
        }
        const int64_t r = lanes.wide;
        const float *last = c + wide * kWordGroup, *units = x.units + wide * kWordGroup;
        if (lanes.lanes == 2)
            turn_words<2>(last, stride, lanes.narrow, columns, units, out + r * os, os);
        else if (lanes.lanes == 4)
            turn_words<4>(last, stride, lanes.narrow, columns, units, out + r * os, os);
    }
}

#endif

} // namespace
} // namespace slipstream
