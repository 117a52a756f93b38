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
constexpr int64_t kPanelRows = 64;         // in two halves where gate and up go together
constexpr int64_t kPanelBytes = 768 << 10; // of a panel; deeper ones are summed in several passes
constexpr int64_t kTokensAtOnce = 528;     // what is packed of so many tokens stays near while panels pass
constexpr int64_t kGroupsAtOnce = Vec::kBlockGroups; // of tokens, with Vec::kBlockRows rows in registers

// From so many rows on a panel's way through the scratch pays. Measured with cold weights, 2048 x 2048 in
// bfloat16: at 16 rows `dots` takes 3/4 of the time, at 64 9/10, at 512 6/5.
constexpr int64_t kManyRows = 48;
constexpr int64_t kProductFloats = kPanelRows * (kTokensAtOnce + kGroupsAtOnce * kGroup + kGroup + 1);
// Scratch of each thread for any product.
constexpr int64_t kProductBytes = kPanelBytes + kProductFloats * static_cast<int64_t>(sizeof(float));

inline bool many(int64_t rows) {
    return rows >= kManyRows;
}

struct FloatWord {
    using Item = float;
    static constexpr int64_t kItems = 1;
    static Vec lanes(const Item* p) { return Vec::load(p); }
    static Vec spread(const Item* p) { return Vec::set(*p); }
    static Vec add(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
    // Packs rows of a result, which are inputs of the next matrix: one word of a group.
    static void pack(const float* rows, int64_t, int64_t, Item* out) { Vec::load(rows).store(out); }
};

#ifdef SLIPSTREAM_BF16_DOT
struct Bf16Word {
    using Item = Bf16;
    static constexpr int64_t kItems = 2;
    static Bf16Lanes lanes(const Item* p) { return Bf16Lanes::load(p); }
    static Bf16Lanes spread(const Item* p) { return Bf16Lanes::spread(p); }
    static Vec add(Vec sum, Bf16Lanes x, Bf16Lanes w) { return dot(sum, x, w); }
    static void pack(const float* rows, int64_t stride, int64_t count, Item* out) {
        Bf16Lanes::pair(Vec::load(rows), count > 1 ? Vec::load(rows + stride) : Vec::set(0)).store(out);
    }
};
#else
using Bf16Word = FloatWord;
#endif

// Calls `f` with the unit that multiplies a matrix of this dtype.
template <class F>
inline void with_word(int32_t dtype, F f) {
    if (Vec::kBf16Dot && dtype == kBfloat16)
        f(Bf16Word());
    else
        f(FloatWord());
}

template <class U>
constexpr int64_t line_items() {
    return kGroup * U::kItems;
}

// Inputs of a row with their padding.
template <class U>
inline int64_t padded(int64_t inputs) {
    return ceil_div(inputs, line_items<U>()) * line_items<U>();
}

// Bytes of the packed rows of a call, whichever unit takes them.
inline int64_t packed_bytes(int64_t tokens, int64_t inputs) {
    return ceil_div(tokens, kGroup) * kGroup * padded<Bf16Word>(inputs) * static_cast<int64_t>(sizeof(float));
}

template <class From, class To>
inline void copy_padded(const From* from, int64_t n, To* to, int64_t width) {
    if constexpr (std::is_same<From, To>::value)
        std::memcpy(to, from, static_cast<size_t>(n) * sizeof(To));
    else
        copy_row(from, to, n);
    std::memset(static_cast<void*>(to + n), 0, static_cast<size_t>(width - n) * sizeof(To));
}

// Packs one group of at most kGroup tokens; `out` is where the group begins.
template <class U, class T>
inline void pack_group(const T* x, int64_t stride, int64_t count, int64_t inputs, typename U::Item* out) {
    constexpr int64_t line = line_items<U>();
    alignas(64) typename U::Item square[kGroup * line];
    std::memset(static_cast<void*>(square), 0, sizeof(square));
    for (int64_t i = 0; i < inputs; i += line, out += kGroup * line) {
        for (int64_t t = 0; t < count; ++t)
            copy_padded(x + t * stride + i, least(line, inputs - i), square + t * line, line);
        transpose(reinterpret_cast<const float*>(square), kGroup, reinterpret_cast<float*>(out), kGroup);
    }
}

// The same for a row-major x of any dtype, the whole team.
template <class U>
inline void pack_rows(const void* x, int32_t dtype, int64_t tokens, int64_t inputs, void* packed,
                      Team& team) {
    auto* out = static_cast<typename U::Item*>(packed);
    each(team, ceil_div(tokens, kGroup), 1, [&](int64_t group, int64_t) {
        const int64_t t = group * kGroup;
        with_dtype(dtype, [&](auto* type) {
            const auto* from = static_cast<decltype(type)>(const_cast<void*>(x)) + t * inputs;
            pack_group<U>(from, inputs, least(kGroup, tokens - t), inputs, out + t * padded<U>(inputs));
        });
    });
}

// c[r][s] = start[r], or what c holds, plus the products of R rows with S groups over `words` words.
template <class U, int R, int S>
inline void multiply_block(const typename U::Item* w, int64_t ws, const typename U::Item* x, int64_t xs,
                           int64_t words, const float* start, float* c, int64_t cs) {
    Vec sums[R][S];
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s)
            sums[r][s] = start ? Vec::set(start[r]) : Vec::load(c + r * cs + s * kGroup);
    for (int64_t k = 0; k < words; ++k) {
        decltype(U::lanes(x)) lanes[S];
        for (int s = 0; s < S; ++s)
            lanes[s] = U::lanes(x + s * xs + k * line_items<U>());
        for (int r = 0; r < R; ++r) {
            const auto row = U::spread(w + r * ws + k * U::kItems);
            for (int s = 0; s < S; ++s)
                sums[r][s] = U::add(sums[r][s], lanes[s], row);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s)
            sums[r][s].store(c + r * cs + s * kGroup);
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
inline void fill_rows(const Matrix& m, int64_t begin, int64_t rows, int64_t from, int64_t n,
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

// Asks for a piece of memory before it is needed, a little at a time.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    int64_t lines = 0;

    void some() {
        for (int64_t i = 0; i < lines && at < end; ++i, at += 64)
            __builtin_prefetch(at, 0, 2);
    }
};

// Rows [begin, begin + rows) of a matrix in `times` calls of `some`; nothing where they do not lie together.
inline Ahead rows_ahead(const Matrix& m, int64_t begin, int64_t rows, int64_t times) {
    if (m.format != kPlain) {
        const int64_t bytes = m.plane_bytes[kCodes] / m.outputs;
        const char* at = static_cast<const char*>(m.planes[kCodes]) + begin * bytes;
        return {at, at + most(rows, 0) * bytes, rows * bytes / 64 / times + 1};
    }
    int64_t first = 0, i = 0;
    while (i + 1 < m.num_runs && begin >= first + m.runs[i].rows)
        first += m.runs[i++].rows;
    const Run& run = m.runs[i];
    const int64_t n = least(rows, first + run.rows - begin), size = m.dtype == kFloat32 ? 4 : 2;
    if (n <= 0 || run.transposed)
        return {};
    const char* at = static_cast<const char*>(run.data) + (begin - first) * run.stride * size;
    const int64_t bytes = ((n - 1) * run.stride + m.inputs) * size;
    return {at, at + bytes, bytes / 64 / times + 1};
}

// What a thread has computed: outputs [begin, begin + outputs) of `tokens` tokens from `token` on. Output j
// of token t is c[j * stride + t], and up[j * stride + t] of the other half where a product has two; both may
// be overwritten. Rows and tokens up to the next multiple of kGroup are there as well.
struct Piece {
    int64_t begin, outputs, token, tokens;
    float *c, *up;
    int64_t stride;
    float* turned; // room for kGroup * kPanelRows
};

// One matrix times packed tokens, shared out to a team panel by panel.
template <class U>
class Product {
public:
    using Item = typename U::Item;

    // `second`: 0, or how far behind the row of an output lies another one that goes with it (gate and up).
    Product(const Matrix& m, int64_t outputs, int64_t second, int64_t tokens, int threads)
        : m_(m), outputs_(outputs), second_(second), tokens_(tokens), halves_(second ? 2 : 1) {
        const int64_t wanted = 6 * static_cast<int64_t>(threads), inputs = padded<U>(m.inputs);
        const int64_t groups = ceil_div(tokens, kGroup), most_groups = kTokensAtOnce / kGroup;
        int64_t chunks = ceil_div(groups, most_groups);
        width_ = kPanelRows / halves_;
        while (width_ > kGroup && ceil_div(outputs, width_) * chunks < wanted)
            width_ /= 2;
        const int64_t passes = ceil_div(inputs, kDeepest);
        deep_ = ceil_div(ceil_div(inputs, passes), kDecoded) * kDecoded;
        pitch_ = deep_ + line_items<U>();
        chunk_ = ceil_div(ceil_div(groups, chunks), kGroupsAtOnce) * kGroupsAtOnce * kGroup;
        stride_ = deep_ < inputs ? chunk_ : kGroupsAtOnce * kGroup;
        panels_ = ceil_div(outputs, width_);
        tasks_ = panels_ * ceil_div(tokens, chunk_);
    }

    // Calls `finish(piece)` for all outputs of all tokens.
    template <class F>
    void run(const void* packed, Team& team, char* own, F finish) const {
        each(team, tasks_, 1, [&](int64_t task, int64_t) {
            work(static_cast<const Item*>(packed), task, task + team.size(), own, finish);
        });
    }

private:
    static constexpr int64_t kDecoded = most(line_items<U>(), kPackedBlock); // passes begin where blocks do
    static constexpr int64_t kDeepest =
        (kPanelBytes / kPanelRows / static_cast<int64_t>(sizeof(Item)) - line_items<U>()) / kDecoded *
        kDecoded;

    template <class F>
    void work(const Item* packed, int64_t task, int64_t next, char* own, F& finish) const {
        auto* panel = reinterpret_cast<Item*>(own);
        auto* c = reinterpret_cast<float*>(own + kPanelBytes);
        float* turned = c + kPanelRows * (kTokensAtOnce + kGroupsAtOnce * kGroup);
        float* start = turned + kPanelRows * kGroup;
        const int64_t begin = task % panels_ * width_, n = least(width_, outputs_ - begin);
        const int64_t token = task / panels_ * chunk_, end = least(tokens_, token + chunk_);
        const int64_t inputs = padded<U>(m_.inputs);
        const int64_t next_begin = next % panels_ * width_, next_n = least(width_, outputs_ - next_begin);
        const int64_t blocks = ceil_div(end - token, kGroupsAtOnce * kGroup) * ceil_div(n, Vec::kBlockRows);
        Ahead ahead[2];
        for (int64_t half = 0; half < halves_; ++half) {
            read_start(begin + half * second_, n, start + half * width_);
            ahead[half] = rows_ahead(m_, next_begin + half * second_, next_n, blocks);
        }
        for (int64_t from = 0; from < inputs; from += deep_) {
            for (int64_t half = 0; half < halves_; ++half)
                bring(begin + half * second_, n, from, panel + half * width_ * pitch_);
            const bool last = from + deep_ >= inputs;
            for (int64_t t = token; t < end; t += kGroupsAtOnce * kGroup) {
                float* at = stride_ == chunk_ ? c + t - token : c;
                const int64_t words = least(deep_, inputs - from) / U::kItems;
                const int64_t groups = least(kGroupsAtOnce, ceil_div(end - t, kGroup));
                const Item* x = packed + t * inputs + from * kGroup;
                for (int64_t half = 0; half < halves_; ++half) {
                    const int64_t r = half * width_;
                    pass(panel + r * pitch_, n, ahead[half], x, groups, words, from ? nullptr : start + r,
                         at + r * stride_);
                }
                if (last && row_factors(m_))
                    for (int64_t half = 0; half < halves_; ++half)
                        scale(begin + half * second_, n, groups * kGroup, at + half * width_ * stride_);
                if (last)
                    finish(Piece{begin, n, t, least(end - t, kGroupsAtOnce * kGroup), at,
                                 second_ ? at + width_ * stride_ : nullptr, stride_, turned});
            }
        }
    }

    void read_start(int64_t row, int64_t n, float* start) const {
        std::memset(start, 0, static_cast<size_t>(width_) * sizeof(float));
        if (m_.bias && !row_factors(m_))
            read_row(m_.bias, m_.bias_dtype, row, start, n);
    }

    // Of a packed matrix the multipliers and the bias come last.
    void scale(int64_t row, int64_t n, int64_t tokens, float* c) const {
        for (int64_t j = 0; j < n; ++j) {
            float bias = 0.0f;
            if (m_.bias)
                read_row(m_.bias, m_.bias_dtype, row + j, &bias, 1);
            const Vec factor = Vec::set(row_factors(m_)[row + j]), shift = Vec::set(bias);
            for (int64_t t = 0; t < tokens; t += kGroup)
                fma(Vec::load(c + j * stride_ + t), factor, shift).store(c + j * stride_ + t);
        }
    }

    void bring(int64_t row, int64_t n, int64_t from, Item* panel) const {
        fill_rows<U>(m_, row, n, from, least(deep_, m_.inputs - from), panel, pitch_);
        const int64_t whole = ceil_div(n, kGroup) * kGroup;
        std::memset(static_cast<void*>(panel + n * pitch_), 0,
                    static_cast<size_t>((whole - n) * pitch_) * sizeof(Item));
    }

    // n rows of a panel times some groups.
    void pass(const Item* panel, int64_t n, Ahead& ahead, const Item* x, int64_t groups, int64_t words,
              const float* start, float* c) const {
        const int64_t group = padded<U>(m_.inputs) * kGroup;
        for (int64_t r = 0; r < n; r += Vec::kBlockRows) {
            ahead.some();
            const Item* w = panel + r * pitch_;
            const float* from = start ? start + r : nullptr;
            float* at = c + r * stride_;
            if (groups == 3)
                multiply_block<U, Vec::kBlockRows, 3>(w, pitch_, x, group, words, from, at, stride_);
            else if (groups == 2)
                multiply_block<U, Vec::kBlockRows, 2>(w, pitch_, x, group, words, from, at, stride_);
            else
                multiply_block<U, Vec::kBlockRows, 1>(w, pitch_, x, group, words, from, at, stride_);
        }
    }

    const Matrix& m_;
    const int64_t outputs_, second_, tokens_, halves_;
    int64_t width_, deep_, pitch_, chunk_, stride_, panels_, tasks_;
};

// Finishes a piece in the order of x: calls `row(token, values)`, the piece's outputs of one token.
template <class F>
inline void each_row(const Piece& p, F row) {
    for (int64_t t = 0; t < p.tokens; t += kGroup) {
        for (int64_t j = 0; j < p.outputs; j += kGroup)
            transpose(p.c + j * p.stride + t, p.stride, p.turned + j, kPanelRows);
        for (int64_t i = 0; i < least(kGroup, p.tokens - t); ++i)
            row(p.token + t + i, p.turned + i * kPanelRows);
    }
}

// Packs a piece as inputs of a matrix that `U` multiplies and that has as many inputs as the product outputs.
template <class U>
inline void pack_piece(const Piece& p, int64_t inputs, void* packed_rows) {
    auto* packed = static_cast<typename U::Item*>(packed_rows);
    const int64_t width = padded<U>(inputs);
    const int64_t end = p.begin + p.outputs == inputs ? width - p.begin : p.outputs;
    for (int64_t t = 0; t < p.tokens; t += kGroup) {
        typename U::Item* out = packed + (p.token + t) * width + p.begin * kGroup;
        for (int64_t j = 0; j < p.outputs; j += U::kItems)
            U::pack(p.c + j * p.stride + t, p.stride, p.outputs - j, out + j * kGroup);
        const int64_t done = ceil_div(p.outputs, U::kItems) * U::kItems;
        std::memset(static_cast<void*>(out + done * kGroup), 0,
                    static_cast<size_t>((end - done) * kGroup) * sizeof(typename U::Item));
    }
}

} // namespace
} // namespace slipstream
