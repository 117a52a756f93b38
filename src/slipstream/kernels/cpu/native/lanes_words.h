// Groups of rows in words times a packed matrix with integer codes. The codes of some of its rows are
// unpacked into L1 as words once; several rows at a time are then multiplied with the same two inputs of a
// group of rows. Sums are exact in int32 until they are multiplied by a scale. A few rows are multiplied this
// way, and many rows by panels (gemm_words.h).
//
// Measured on a Zen 3 with AVX2, one thread, 576 x 1536 from memory, compared with weights converted to
// float32: eight rows of int8 take 0.75 of the time, of int4 0.44 and of fp6 0.35; two rows of int4 0.44.
// Rows rounded to bytes times int4, in the cache and compared with the same rows in words: 0.62 of the time,
// two rows 0.69, and 512 of them by panels 0.56.
#pragma once

namespace slipstream {
namespace {

#ifndef SLIPSTREAM_BF16_DOT

// Rows of the matrix that are in L1 together.
constexpr int64_t kWordTile = most(8, kWordGroup);

// Lanes hold pairs of inputs, in words. kNumbers: codes have groups.
template <bool kHasNumbers>
struct Pairs {
    using Sum = PairSums;
    static constexpr bool kNumbers = kHasNumbers;
    static constexpr int kInputs = 2;
};
// Lanes hold groups of four inputs, in bytes.
#ifdef SLIPSTREAM_FOURS
struct Fours {
    using Sum = FourSums;
    static constexpr bool kNumbers = true;
    static constexpr int kInputs = 4;
};
#endif

// Calls `f` with the kind of lanes that a matrix is multiplied with.
template <class F>
inline void with_lanes(const Matrix& m, F f) {
#ifdef SLIPSTREAM_FOURS
    if (in_fours(m))
        return f(Fours());
#endif
    if (m.group)
        f(Pairs<true>());
    else
        f(Pairs<false>());
}

// Unpacks the codes of inputs [k, k + n) of a row to words, or to bytes where lanes hold four inputs, with
// zeros beyond the inputs; n is a multiple of kWordStep. For formats with groups, the numbers of each span
// follow in float32: all scales, then what is added per unit of the inputs (minima).
template <class P>
class CodeWords {
public:
    // `span` is a power of two, like the groups: shifts take less time than divisions, which would delay a
    // tile.
    CodeWords(const Matrix& m, int64_t span)
        : m_(m), rows_(m), shift_(__builtin_ctzll(static_cast<uint64_t>(span))),
          groups_(m.group ? ceil_div(m.inputs, m.group) : 0), per_group_(m.group >> shift_) {}

    // Selects inputs [k, k + n).
    void begin(int64_t k, int64_t n) {
        k_ = k, n_ = n, first_ = k >> shift_;
        spans_ = (n + (int64_t{1} << shift_) - 1) >> shift_;
        whole_ = most(0, least(n, (m_.group ? groups_ * m_.group : m_.inputs) - k));
        there_ = most(0, least(spans_, groups_ * per_group_ - first_));
    }

    [[gnu::always_inline]] void bring(int64_t o, int16_t* to) const {
        const PackedRow row = rows_.row(o);
        if (whole_ < n_)
            std::memset(to + whole_ * 2 / P::kInputs, 0, static_cast<size_t>(n_ - whole_) * 4 / P::kInputs);
        if constexpr (!P::kNumbers) {
            bring_int8(reinterpret_cast<const int8_t*>(row.codes) + k_, whole_, to);
        } else {
            float unit = 1;
            if constexpr (P::kInputs == 4) {
                bring_bytes(row.codes + k_ / 2, whole_, reinterpret_cast<uint8_t*>(to));
            } else if (m_.format == kFp6E2m3) {
                unit = SixesOfBytes::kUnit;
                bring_blocks<SixesOfBytes>(row, k_, whole_, to);
            } else {
                bring_blocks<HalvesOfBytes>(row, k_, whole_, to);
            }
            auto* numbers = reinterpret_cast<float*>(to + n_ * 2 / P::kInputs);
            const bool beyond = (m_.outputs - o) * groups_ >= first_ + there_ + Vec::kWidth;
            bring_numbers(row.scales, unit, beyond, numbers);
            bring_numbers(row.minima ? row.minima : row.scales, row.minima ? 1 : (is_int4(m_) ? -8 : 0),
                          beyond, numbers + spans_);
        }
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

    static void bring_bytes([[maybe_unused]] const uint8_t* from, [[maybe_unused]] int64_t n,
                            [[maybe_unused]] uint8_t* to) {
#ifdef SLIPSTREAM_FOURS
        int64_t j = 0;
        for (; j + 64 <= n; j += 64)
            part_halves(from + j / 2, to + j);
        if (j < n) {
            uint8_t rest[32] = {};
            std::memcpy(rest, from + j / 2, sizeof(rest) / 2);
            part_halves(rest, to + j);
        }
#endif
    }

    // Writes the numbers of the spans times `factor`, and zeros for spans beyond the planes. Up to a vector
    // after `to` may be overwritten; `beyond`: whether as much can be read after `from`.
    [[gnu::always_inline]] void bring_numbers(const Half* from, float factor, bool beyond, float* to) const {
        int64_t j = 0;
        for (; per_group_ > 1 && j < there_; ++j)
            to[j] = widen_one(from + (first_ + j) / per_group_) * factor;
        for (; j < there_; j += Vec::kWidth) {
            const Half* at = from + first_ + j;
            prefetch(reinterpret_cast<const char*>(at) + kPackedAhead / 8);
            const Vec some = beyond ? Vec::load(at) : Vec::load(at, least(there_ - j, Vec::kWidth));
            (some * Vec::set(factor)).store(to + j);
        }
        for (j = there_; j < spans_; ++j)
            to[j] = 0;
    }

    const Matrix& m_;
    const PackedRows rows_;
    const int shift_;
    const int64_t groups_, per_group_;          // groups of a row; spans of each group
    int64_t k_ = 0, n_ = 0, whole_ = 0;         // inputs, and how many of them the planes have
    int64_t first_ = 0, spans_ = 0, there_ = 0; // their spans, and how many of them the planes have
};

// Arguments of a product of some rows of codes, as laid out by CodeWords, with groups of rows, as laid out by
// WordRows.
struct WordPass {
    const int16_t* codes;
    int64_t pitch, inputs; // words between rows; inputs of each row
    const int16_t* x;
    int64_t group, span, apart; // words between groups; inputs of a span, and words between spans
    bool first;                 // c is overwritten, not added to
    float* c;
    int64_t stride;
    Ahead* ahead;
};

// sums[r][s] = the products of `inputs` inputs for R rows of codes and S groups of rows in W lanes each.
template <class P, int R, int S, int W>
[[gnu::always_inline]] inline void words_span(const WordPass& p, const int16_t* codes, const int16_t* x,
                                              int64_t inputs, typename P::Sum (&sums)[R][S]) {
    const auto step = [&](auto add) {
        WordPairs lanes[S];
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            lanes[s] = WordPairs::load(x + s * p.group);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const WordPairs some = WordPairs::spread<W>(codes + r * p.pitch);
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s] = add(sums[r][s], lanes[s], some);
        }
        codes += 2 * W, x += 2 * kWordGroup;
    };
    using Sum = typename P::Sum;
    const auto add = [](Sum sum, WordPairs lanes, WordPairs some) { return dot(sum, lanes, some); };
    if constexpr (P::kInputs == 4) {
        step([](Sum, WordPairs lanes, WordPairs some) { return Sum::of(lanes, some); });
#pragma GCC unroll 8
        for (int i = 1; i < kFourSpan / (4 * W); ++i)
            step(add);
    } else {
        constexpr int kSteps = S == 1 ? 4 : 1; // a single group of rows has few products per step
#pragma GCC unroll 16
        for (auto& row : sums)
#pragma GCC unroll 16
            for (auto& sum : row)
                sum = Sum::of(Vec::set(0));
        for (int64_t left = inputs; left > 0; left -= 2 * W * kSteps)
#pragma GCC unroll 4
            for (int i = 0; i < kSteps; ++i)
                step(add);
    }
}

// c[r][s] = its previous value (zero if `first`), plus R rows of codes, from `row` on, times S groups.
template <class P, int R, int S, int W>
[[gnu::noinline]] void words_block(const WordPass& p, int64_t row) {
    const int16_t *w = p.codes + row * p.pitch, *x = p.x;
    const auto* numbers = reinterpret_cast<const float*>(w + p.inputs * 2 / P::kInputs);
    const int64_t spans = ceil_div(p.inputs, p.span);
    float* c = p.c + row * p.stride;
    // Stored on the stack, because registers cannot be indexed at run time.
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
    for (int64_t k = 0; k < p.inputs; k += p.span, w += p.span * 2 / P::kInputs, x += p.apart, ++numbers) {
        typename P::Sum sums[R][S];
        p.ahead->some();
        words_span<P, R, S, W>(p, w, x, least(p.span, p.inputs - k), sums);
        const auto* of_rows = reinterpret_cast<const float*>(x + p.apart - kWordSums);
        each_total([&](int r, int s, float* to) {
            Vec total = Vec::load(to);
            if constexpr (P::kNumbers) {
                const float* here = numbers + r * (p.pitch / 2);
                total = fma(sums[r][s].floats(), Vec::repeat(here), total);
                total = fma(Vec::load(of_rows + s * (p.group / 2)), Vec::repeat(here + spans), total);
            } else {
                total = total + sums[r][s].floats();
            }
            total.store(to);
        });
    }
    each_total(
        [&](int r, int s, const float* from) { Vec::load(from).store(c + r * p.stride + s * kWordGroup); });
}

// A register block: R rows of a tile and S groups of rows of x whose sums fit in registers, with W lanes per
// row.
template <int R, int S, int W>
struct WordShape {
    static constexpr int kRows = R, kGroups = S, kLanes = W;
};

// c[r * stride + g * kWordGroup] on = row r of a tile times group g of the rows of x, from input k on.
template <class P>
inline void words_tile(const WordLanes& lanes, const Matrix& m, const int16_t* x, int64_t k, WordPass p) {
    const int64_t wide = ceil_div(lanes.wide, kWordGroup), spans = k / lanes.span;
    float* c = p.c;
    const auto run = [&](int64_t g, auto shape) {
        constexpr int R = decltype(shape)::kRows, S = decltype(shape)::kGroups, W = decltype(shape)::kLanes;
        p.apart = WordRows{m, W, lanes.span, lanes.numbers}.apart();
        p.x = x + g * p.group + spans * p.apart;
        p.c = c + g * kWordGroup;
        for (int64_t r = 0; r < kWordTile; r += R)
            words_block<P, R, S, W>(p, r);
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

// out[i * os + j] = the product of row i of `count` rows, each in W lanes of c, with row j of `columns` rows
// of a tile.
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
template <class P>
inline void multiply_word_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                int64_t os) {
    constexpr int64_t kDeep = 6 * kWordSpan;                // inputs of a tile
    constexpr int64_t kPitch = kDeep + kDeep / 32 * 4 + 32; // not a power of two
    constexpr int64_t kMostGroups = ceil_div(kFewRows, kWordGroup) + 1;
    alignas(64) int16_t tile[kWordTile * kPitch];
    alignas(64) float c[kWordTile * kMostGroups * kWordGroup];
    const WordLanes lanes(m, x.rows.count);
    CodeWords<P> codes(m, lanes.span);
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
            codes.begin(k, deep);
            for (int64_t r = 0; r < kWordTile; ++r) // rows beyond the last one repeat it
                codes.bring(o + least(r, columns - 1), tile + r * kPitch);
            const WordPass pass = {tile, kPitch, deep, nullptr, lanes.group, lanes.span,
                                   0,    k == 0, c,    stride,  &ahead};
            words_tile<P>(lanes, m, x.words, k, pass);
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

inline void multiply_word_lanes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                                int64_t os) {
    with_lanes(m, [&](auto way) { multiply_word_lanes<decltype(way)>(x, m, begin, end, out, os); });
}

#endif

} // namespace
} // namespace slipstream
