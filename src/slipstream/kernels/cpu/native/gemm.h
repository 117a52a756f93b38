// Many rows times a matrix. The rows of x are packed once, so that a vector holds the same inputs of a group
// of tokens; a thread copies a panel of the matrix into its scratch and multiplies all tokens with it while
// it is in the cache. A word is what one product instruction takes of a row: a float or two Bf16. A line is
// as many words as a group has tokens.
//
// packed   [group][word][token in group]      inputs padded with zeros to whole lines
// panel    [row][word]                        likewise; the row pitch is not a power of two
// result   [row][token]                       transposed: its consumer may transpose it or pack it again
//
// Source: Goto and van de Geijn 2008 (ACM TOMS 34:3), sections 4 and 5, with x in the role of B.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kGroup = Vec::kWidth;
constexpr int64_t kTokensAtOnce = 528; // their packed rows stay in the cache while panels pass

// Panel parameters shared by all units that compute in registers; the `...Word` structs inherit them.
struct InRegisters {
    static constexpr int64_t kPanelRows = 64;         // in two halves if gate and up are computed together
    static constexpr int64_t kPanelBytes = 768 << 10; // deeper panels are summed in several passes
    static constexpr int64_t kDeepRows = kPanelRows;  // rows that fit into a panel of any depth
    static constexpr int64_t kGroups = Vec::kBlockGroups; // of tokens, with Vec::kBlockRows rows in registers
    static constexpr int64_t kBlock = 0; // panels should have a multiple of this many rows; 0: any number
    // Items that are inserted after every `kSpan` inputs of a packed token, and of a row of a panel.
    static constexpr int64_t kSpan = 1, kBetween = 0, kBetweenRow = 0;
    static constexpr int64_t kAlign = 1;      // rows of a panel are padded to a multiple of this many inputs
    static constexpr bool kPacksRows = false; // whether a function of the unit packs the rows
    static constexpr int kPadding = 0;        // the code of zero
    using Sum = int32_t;                      // of a row of the matrix, which zero points are multiplied by
    static constexpr bool kZeros = true;      // zero points of rounded rows are subtracted from the result
    // Conversions between the type of sums during accumulation and Vec, as which they are stored.
    static Vec sum_of(Vec stored) { return stored; }
    static Vec stored(Vec sum) { return sum; }
};

struct FloatWord : InRegisters {
    using Item = float;
    static constexpr bool kRounds = false; // whether rows are codes of a grid
    static constexpr int32_t kStored = kFloat32;
    static constexpr int64_t kItems = 1;
    static Vec lanes(const Item* p) { return Vec::load(p); }
    static Vec spread(const Item* p) { return Vec::set(*p); }
    static Vec add(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
    // Pack rows of a result, which are inputs of the next matrix: one word of each token in a group.
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

// Sums are int32 until they are finished.
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
    // Combine four inputs of each lane's row into a word.
    static Codes word(Vec a, Vec b, Vec c, Vec d) { return four_of(a, b, c, d); }
};
#else
using Bf16Word = FloatWord;
#endif

template <class U>
constexpr int64_t line_items() {
    return kGroup * U::kItems;
}

// Return the inputs of a row including padding.
template <class U>
inline int64_t padded(int64_t inputs) {
    constexpr int64_t kStep = most(line_items<U>(), U::kAlign);
    return ceil_div(inputs, kStep) * kStep;
}

// Return the items that this many inputs of a packed token take, in whole lines.
template <class U>
constexpr int64_t packed_items(int64_t inputs) {
    return inputs + inputs / U::kSpan * U::kBetween;
}

// Return an upper bound, for any unit, on the bytes of the packed rows of a call.
inline int64_t packed_bytes(int64_t tokens, int64_t inputs) {
    constexpr int64_t kGrid = 2; // numbers per rounded token: scale and zero point
    // Padding may make words of very small matrices take more than floats.
    const int64_t width = most(padded<Bf16Word>(inputs), Vec::kBf16Dot ? 0 : ceil_div(inputs, 64) * 64);
    return ceil_div(tokens, kGroup) * kGroup * (width + kGrid) * static_cast<int64_t>(sizeof(float));
}

// Return the scales of packed codes: one per token, in whole groups, followed by as many zero points (int32).
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

// Pack one group of at most kGroup tokens; `out` is the start of the group. `grids` has one grid per token if
// they are rounded, otherwise it is null.
template <class U, class T>
inline void pack_group(const T* x, int64_t stride, int64_t count, int64_t inputs, const Grid* grids,
                       typename U::Item* out) {
    constexpr int64_t line = line_items<U>();
    alignas(64) typename U::Item square[kGroup * line];
    std::memset(static_cast<void*>(square), 0, sizeof(square));
    for (int64_t i = 0; i < inputs; i += line, out += kGroup * packed_items<U>(line)) {
        const int64_t n = least(line, inputs - i);
        if constexpr (std::is_same<T, typename U::Item>::value && !U::kRounds) {
            if (!grids && n == line && count == kGroup && stride % U::kItems == 0) { // read directly from x
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
                if (n < line) // skip this for full lines: even a memset of zero bytes takes time
                    std::memset(static_cast<void*>(to + n), U::kPadding,
                                static_cast<size_t>(line - n) * sizeof(typename U::Item));
                continue;
            }
            if constexpr (!U::kRounds) {
                if (n == line)
                    copy_row(from, to, line); // a constant number of vectors
                else
                    copy_padded(from, n, to, line);
            }
        }
        transpose(reinterpret_cast<const float*>(square), kGroup, reinterpret_cast<float*>(out), kGroup);
        if constexpr (U::kBetween > 0)
            U::part(out);
    }
}

// Store the grids of a group of tokens, from token t on, behind the packed codes.
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

// Pack a row-major x of any dtype in the form that `m` requires; run by the whole team.
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
    int64_t pitch, rows; // pitch: items between rows
    const Item* x;
    int64_t group, groups, words; // items of a group; words to sum over
    bool first;                   // c is overwritten, not added to
    const float* start;           // initial values of the sums of each row, used if `first`
    float* c;
    int64_t stride;
    Ahead* ahead;
};

// c[r][s] = its previous value, or, if `first`, the row's start value, plus the products of R rows, from
// `row` on, with S groups. A separate function: inlined into its callers, the compiler runs out of registers
// and the innermost loop waits for memory, which cost a third of its rate.
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

// Copy inputs [from, from + n) of `rows` rows of a run of `T`, starting with `row`, into a panel.
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

// Copy inputs [from, from + n) of rows [begin, begin + rows) of a matrix into a panel; weights of a packed
// matrix are stored before their factors are applied.
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

// The panels of units that compute in registers: row by row.
template <class U>
struct RowPanel {
    using Item = typename U::Item;
    struct Session {}; // no state is needed during a product
    static constexpr bool kStarts = true;
    static int64_t pitch(int64_t deep) { return deep + line_items<U>(); }

    // Return the rows in place, with their pitch in items, or null if they have to be copied into a panel.
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

    // Copy `rows` rows of a matrix into a panel, followed by zero rows up to a whole number of groups.
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
