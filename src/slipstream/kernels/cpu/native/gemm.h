// Many rows times a matrix. The rows of x are packed once, so that a vector holds the same inputs of a group
// of tokens; a thread brings a panel of the matrix into its scratch and passes all tokens over it while it is
// in the cache. A word is what one product takes of a row: a float or two Bf16. A line is as many words as a
// group has tokens.
//
// packed   [group][word][token in group]      inputs padded with zeros to whole lines
// panel    [row][word]                        likewise; the distance of rows is no power of two
// result   [row][token]                       transposed: what finishes it may turn it or pack it again
//
// Source: Goto and van de Geijn 2008 (ACM TOMS 34:3), sections 4 and 5, with x in the role of B.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kGroup = Vec::kWidth;
constexpr int64_t kTokensAtOnce = 528; // what is packed of so many tokens stays near while panels pass

// A panel is shared by all units that compute in registers.
struct InRegisters {
    static constexpr int64_t kPanelRows = 64;             // in two halves where gate and up go together
    static constexpr int64_t kPanelBytes = 768 << 10;     // deeper panels are summed in several passes
    static constexpr int64_t kDeepRows = kPanelRows;      // that a panel of any depth has room for
    static constexpr int64_t kGroups = Vec::kBlockGroups; // of tokens, with Vec::kBlockRows rows in registers
    static constexpr int64_t kBlock = 0;                  // rows that panels want a multiple of, 0: any
    // Items that lie between each `kSpan` inputs: of a packed token, and of a row of a panel.
    static constexpr int64_t kSpan = 1, kBetween = 0, kBetweenRow = 0;
    static constexpr int64_t kAlign = 1;      // rows of a panel end at a multiple of so many inputs
    static constexpr bool kPacksRows = false; // by a function of its own
    static constexpr int kPadding = 0;        // the code of zero
    using Sum = int32_t;                      // of a row, which zero points are multiplied by
    static constexpr bool kZeros = true;      // zero points of rows that are rounded are left for the result
    // What sums are while they are added to, and in memory.
    static Vec sum_of(Vec stored) { return stored; }
    static Vec stored(Vec sum) { return sum; }
};

struct FloatWord : InRegisters {
    using Item = float;
    static constexpr bool kRounds = false; // rows are codes of a grid
    static constexpr int32_t kStored = kFloat32;
    static constexpr int64_t kItems = 1;
    static Vec lanes(const Item* p) { return Vec::load(p); }
    static Vec spread(const Item* p) { return Vec::set(*p); }
    static Vec add(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
    // Packs rows of a result, which are inputs of the next matrix: one word of a group.
    static void pack(const float* rows, int64_t, int64_t, Item* out) { Vec::load(rows).store(out); }
};

#ifdef SLIPSTREAM_BF16_DOT
struct Bf16Word : InRegisters {
    using Item = Bf16;
    static constexpr bool kRounds = false;
    static constexpr int32_t kStored = kBfloat16;
    static constexpr int64_t kItems = 2;
    static Bf16Lanes lanes(const Item* p) { return Bf16Lanes::load(p); }
    static Bf16Lanes spread(const Item* p) { return Bf16Lanes::spread<1>(p); }
    static Vec add(Vec sum, Bf16Lanes x, Bf16Lanes w) { return dot(sum, x, w); }
    static void pack(const float* rows, int64_t stride, int64_t count, Item* out) {
        Bf16Lanes::pair(Vec::load(rows), count > 1 ? Vec::load(rows + stride) : Vec::set(0)).store(out);
    }
};

// Sums are of int32 until they are settled.
struct ByteWord : InRegisters {
    using Item = uint8_t;
    static constexpr bool kRounds = true;
    static constexpr int32_t kStored = -1;
    static constexpr int64_t kItems = 4;
    static Codes lanes(const Item* p) { return Codes::load(p); }
    static Codes spread(const Item* p) { return Codes::spread<1>(p); }
    static CodeSums sum_of(Vec stored) { return CodeSums::of(stored); }
    static Vec stored(CodeSums sum) { return sum.bits(); }
    static CodeSums add(CodeSums sum, Codes x, Codes w) { return dot(sum, x, w); }
    static Vec less_zeros(Vec sums, Vec zeros, Sum row) { return less_product(sums, zeros, integers(row)); }
    // A word of each lane's row.
    static Codes word(Vec a, Vec b, Vec c, Vec d) { return four_of(a, b, c, d); }
};
#else
using Bf16Word = FloatWord;
#endif

template <class U>
constexpr int64_t line_items() {
    return kGroup * U::kItems;
}

// Inputs of a row with their padding.
template <class U>
inline int64_t padded(int64_t inputs) {
    constexpr int64_t kStep = most(line_items<U>(), U::kAlign);
    return ceil_div(inputs, kStep) * kStep;
}

// Items that so many inputs of a packed token take, whole lines of them.
template <class U>
constexpr int64_t packed_items(int64_t inputs) {
    return inputs + inputs / U::kSpan * U::kBetween;
}

// Bytes of the packed rows of a call, whichever unit takes them.
inline int64_t packed_bytes(int64_t tokens, int64_t inputs) {
    constexpr int64_t kGrid = 2; // of a token that is rounded
    // Words of the smallest matrices take more than floats.
    const int64_t width = most(padded<Bf16Word>(inputs), Vec::kBf16Dot ? 0 : ceil_div(inputs, 64) * 64);
    return ceil_div(tokens, kGroup) * kGroup * (width + kGrid) * static_cast<int64_t>(sizeof(float));
}

// The scales of packed codes, one for each token of whole groups, and behind them as many zero points
// (int32).
template <class U>
inline float* packed_grids(const typename U::Item* packed, int64_t tokens, int64_t inputs) {
    auto* codes = const_cast<typename U::Item*>(packed);
    return reinterpret_cast<float*>(codes +
                                    ceil_div(tokens, kGroup) * kGroup * packed_items<U>(padded<U>(inputs)));
}

template <class From, class To>
inline void copy_padded(const From* from, int64_t n, To* to, int64_t width) {
    if constexpr (std::is_same<From, To>::value)
        std::memcpy(to, from, static_cast<size_t>(n) * sizeof(To));
    else
        copy_row(from, to, n);
    std::memset(static_cast<void*>(to + n), 0, static_cast<size_t>(width - n) * sizeof(To));
}

// Packs one group of at most kGroup tokens; `out` is where the group begins. `grids` are the tokens' own
// where they are rounded, else null.
template <class U, class T>
inline void pack_group(const T* x, int64_t stride, int64_t count, int64_t inputs, const Grid* grids,
                       typename U::Item* out) {
    constexpr int64_t line = line_items<U>();
    alignas(64) typename U::Item square[kGroup * line];
    std::memset(static_cast<void*>(square), 0, sizeof(square));
    for (int64_t i = 0; i < inputs; i += line, out += kGroup * packed_items<U>(line)) {
        const int64_t n = least(line, inputs - i);
        if constexpr (std::is_same<T, typename U::Item>::value && !U::kRounds) {
            if (!grids && n == line && count == kGroup && stride % U::kItems == 0) { // a square as it lies
                transpose(reinterpret_cast<const float*>(x + i), stride / U::kItems,
                          reinterpret_cast<float*>(out), kGroup);
                continue;
            }
        }
        for (int64_t t = 0; t < count; ++t) {
            const T* from = x + t * stride + i;
            typename U::Item* to = square + t * line;
            if (grids) {
                round_row(from, n, grids[t], to);
                if (n < line) // even nothing takes long to fill
                    std::memset(static_cast<void*>(to + n), U::kPadding,
                                static_cast<size_t>(line - n) * sizeof(typename U::Item));
                continue;
            }
            if constexpr (!U::kRounds) {
                if (n == line)
                    copy_row(from, to, line); // as many vectors as the compiler knows
                else
                    copy_padded(from, n, to, line);
            }
        }
        transpose(reinterpret_cast<const float*>(square), kGroup, reinterpret_cast<float*>(out), kGroup);
        if constexpr (U::kBetween > 0)
            U::part(out);
    }
}

// The grids of a group of tokens, from token t on, to their places beside what is packed.
template <class U>
inline void store_grids(const Grid* grids, int64_t t, int64_t tokens, int64_t inputs,
                        typename U::Item* packed) {
    float* scales = packed_grids<U>(packed, tokens, inputs) + t;
    float* zeros = scales + ceil_div(tokens, kGroup) * kGroup;
    for (int64_t i = 0; i < kGroup; ++i) {
        const auto zero = static_cast<int32_t>(grids[i].zero);
        scales[i] = grids[i].scale;
        std::memcpy(zeros + i, &zero, sizeof(zero));
    }
}

// The same for a row-major x of any dtype, the whole team, as `m` takes its inputs.
template <class U>
inline void pack_rows(const void* x, int32_t dtype, int64_t tokens, const Matrix& m, void* packed,
                      Team& team) {
    const int64_t inputs = m.inputs;
    auto* out = static_cast<typename U::Item*>(packed);
    each(team, ceil_div(tokens, kGroup), 1, [&](int64_t group, int64_t) {
        const int64_t t = group * kGroup;
        with_dtype(dtype, [&](auto* type) {
            const auto* from = static_cast<decltype(type)>(const_cast<void*>(x)) + t * inputs;
            const int64_t count = least(kGroup, tokens - t);
            if constexpr (U::kPacksRows) {
                U::pack(m, from, count, out + t * packed_items<U>(padded<U>(inputs)),
                        packed_grids<U>(out, tokens, inputs) + t);
                return;
            } else {
                Grid grids[kGroup] = {};
                for (int64_t i = 0; m.input_bits && i < count; ++i)
                    grids[i] = grid_of(from + i * inputs, inputs, m.input_zero != 0);
                pack_group<U>(from, inputs, count, inputs, m.input_bits ? grids : nullptr,
                              out + t * packed_items<U>(padded<U>(inputs)));
                if constexpr (U::kRounds)
                    store_grids<U>(grids, t, tokens, inputs, out);
            }
        });
    });
}

// Some rows of a panel times some groups of tokens.
template <class Item>
struct Pass {
    const Item* panel;
    int64_t pitch, rows; // items between rows
    const Item* x;
    int64_t group, groups, words; // items of a group, and words to sum over
    bool first;                   // c is written, not added to
    const float* start;           // what the sums of each row begin with, where that is not c
    float* c;
    int64_t stride;
    Ahead* ahead;
};

// c[r][s] = what it holds, or where `first` what the rows start with, plus the products of R rows, from `row`
// on, with S groups. A function of its own: within its callers the compiler runs out of registers, and the
// innermost loop then waits for memory (a third of its rate was lost that way).
template <class U, int R, int S>
[[gnu::noinline]] void multiply_block(const Pass<typename U::Item>& p, int64_t row) {
    using Item = typename U::Item;
    const Item *w = p.panel + row * p.pitch, *x = p.x;
    const int64_t pitch = p.pitch, group = p.group, words = p.words;
    float* c = p.c + row * p.stride;
    decltype(U::sum_of(Vec())) sums[R][S];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            sums[r][s] =
                U::sum_of(p.first ? Vec::set(p.start[row + r]) : Vec::load(c + r * p.stride + s * kGroup));
    for (int64_t k = 0; k < words; ++k, x += line_items<U>(), w += U::kItems) {
        decltype(U::lanes(x)) lanes[S];
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            lanes[s] = U::lanes(x + s * group);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto weight = U::spread(w + r * pitch);
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
                sums[r][s] = U::add(sums[r][s], lanes[s], weight);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s)
            U::stored(sums[r][s]).store(c + r * p.stride + s * kGroup);
}

// Inputs [from, from + n) of row `row` on of a run of `T`, into `rows` rows of a panel.
template <class U, class T>
inline void fill_run(const Run& run, int64_t row, int64_t rows, int64_t from, int64_t n,
                     typename U::Item* panel, int64_t pitch) {
    const T* w = static_cast<const T*>(run.data);
    const int64_t width = padded<U>(n);
    if (!run.transposed) {
        for (int64_t r = 0; r < rows; ++r)
            copy_padded(w + (row + r) * run.stride + from, n, panel + r * pitch, width);
        return;
    }
    alignas(64) float square[kGroup * kGroup] = {}, turned[kGroup * kGroup];
    for (int64_t r = 0; r < rows; r += kGroup) {
        const int64_t count = least(kGroup, rows - r);
        for (int64_t i = 0; i < width; i += kGroup) {
            for (int64_t k = 0; k < kGroup; ++k) {
                if (i + k < n)
                    copy_padded(w + (from + i + k) * run.stride + row + r, count, square + k * kGroup, count);
                else
                    std::memset(square + k * kGroup, 0, sizeof(float) * kGroup);
            }
            transpose(square, kGroup, turned, kGroup);
            for (int64_t k = 0; k < count; ++k)
                copy_row(turned + k * kGroup, panel + (r + k) * pitch + i, kGroup);
        }
    }
}

// The same of rows [begin, begin + rows) of a matrix; of a packed one before their multipliers.
template <class U>
inline void fill_words(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n,
                       typename U::Item* panel, int64_t pitch) {
    if (m.format != kPlain) {
        decode(m, begin, rows, from, n, panel, pitch);
        const int64_t left = padded<U>(n) - n;
        for (int64_t r = 0; left && r < rows; ++r)
            std::memset(static_cast<void*>(panel + r * pitch + n), 0,
                        static_cast<size_t>(left) * sizeof(typename U::Item));
        return;
    }
    int64_t first = 0;
    for (int64_t i = 0; i < m.num_runs; first += m.runs[i++].rows) {
        const int64_t at = most(begin, first), end = least(begin + rows, first + m.runs[i].rows);
        if (at >= end)
            continue;
        with_dtype(m.dtype, [&](auto* type) {
            using T = typename std::remove_pointer<decltype(type)>::type;
            fill_run<U, T>(m.runs[i], at - first, end - at, from, n, panel + (at - begin) * pitch, pitch);
        });
    }
}

template <class U>
inline void fill_rows(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n,
                      typename U::Item* panel, int64_t pitch) {
    if constexpr (U::kRounds) {
        const uint8_t* codes = PackedRows(m).row(begin).codes + from;
        for (int64_t r = 0; r < rows; ++r)
            copy_padded(codes + r * m.inputs, n, panel + r * pitch, padded<U>(n));
    } else {
        fill_words<U>(m, begin, rows, from, n, panel, pitch);
    }
}

// How a unit that computes in registers has its panels: row by row.
template <class U>
struct RowPanel {
    using Item = typename U::Item;
    struct Session {}; // nothing to be had for the time of a product
    static constexpr bool kStarts = true;
    static int64_t pitch(int64_t deep) { return deep + line_items<U>(); }

    // The same rows where they lie, and their distance in items; null where they have to be brought.
    static const Item* here(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n,
                            int64_t* pitch) {
        if (rows % Vec::kBlockRows || n % line_items<U>())
            return nullptr;
        if constexpr (U::kRounds) {
            *pitch = m.inputs;
            return reinterpret_cast<const Item*>(PackedRows(m).row(begin).codes + from);
        }
        if (m.format != kPlain || m.dtype != U::kStored)
            return nullptr;
        int64_t first = 0, i = 0;
        while (i + 1 < m.num_runs && begin >= first + m.runs[i].rows)
            first += m.runs[i++].rows;
        const Run& run = m.runs[i];
        if (run.transposed || begin + rows > first + run.rows)
            return nullptr;
        *pitch = run.stride;
        return static_cast<const Item*>(run.data) + (begin - first) * run.stride + from;
    }

    // `rows` rows of a matrix, and zeros up to a whole number of groups.
    static void bring(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n, Item* panel,
                      int64_t pitch) {
        fill_rows<U>(m, begin, rows, from, n, panel, pitch);
        const int64_t whole = ceil_div(rows, kGroup) * kGroup;
        std::memset(static_cast<void*>(panel + rows * pitch), 0,
                    static_cast<size_t>((whole - rows) * pitch) * sizeof(Item));
    }

    static int64_t blocks(int64_t rows, int64_t) { return ceil_div(rows, Vec::kBlockRows); }

    static void multiply(const Pass<Item>& p) {
        constexpr int R = Vec::kBlockRows;
        for (int64_t r = 0; r < p.rows; r += R) {
            p.ahead->some();
            if (p.groups == 3)
                multiply_block<U, R, 3>(p, r);
            else if (p.groups == 2)
                multiply_block<U, R, 2>(p, r);
            else
                multiply_block<U, R, 1>(p, r);
        }
    }
};

} // namespace
} // namespace slipstream
