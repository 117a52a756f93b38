// One matrix times packed tokens, distributed over a team panel by panel, and the post-processing of the
// result.
#pragma once

namespace slipstream {
namespace {

template <class U>
struct PanelFor {
    using Type = RowPanel<U>;
};
#ifdef SLIPSTREAM_BF16_DOT
template <>
struct PanelFor<GroupedWord> {
    using Type = GroupedPanel;
};
#else
template <class P>
struct PanelFor<WholeWord<P>> {
    using Type = WordPanel<P>;
};
#endif
#ifdef SLIPSTREAM_AMX
template <>
struct PanelFor<TileWord> {
    using Type = TilePanel<TileWord>;
};
template <>
struct PanelFor<ByteTileWord> {
    using Type = TilePanel<ByteTileWord>;
};
using Bf16Unit = TileWord;
using ByteUnit = ByteTileWord;
using GroupedUnit = TileWord;
constexpr int64_t kManyRowsInTiles = 9; // for a matrix that is not read in place, see lanes_tiles.h
constexpr int64_t kManyRowsInTerms = 9;
#else
using Bf16Unit = Bf16Word;
#ifdef SLIPSTREAM_BF16_DOT
using ByteUnit = ByteWord;
using GroupedUnit = GroupedWord;
#endif
constexpr int64_t kManyRowsInTiles = kManyRows;
// The minimum number of rows for panels, for float32 rows and a packed matrix whose codes are not integers: a
// row in three terms costs more than a row in a panel. Measured on a Zen 4 with 576 x 576 of fp8: at 24 rows
// 233 us by terms and 265 by panels.
constexpr int64_t kManyRowsInTerms = Vec::kBf16Dot ? 25 : kManyRows;
#endif

// The minimum number of rows for panels, for rows that are rounded to bytes and do not go in lanes
// (lanes_rounded.h); fewer rows go by panels only where they nearly fill a group of tokens (kFewestInGroup).
// Measured with 2048 x 2048 from memory and 576 x 576 in the cache: 16 rows by panels take 1.02 and 0.59 of
// the time, 17 rows 1.31 and 0.94, 28 rows 0.88 and 0.58.
constexpr int64_t kManyRowsInBytes = Vec::kBf16Dot ? least(24, kManyRowsInTiles) : kManyRowsInTiles;
constexpr int64_t kManyRowsInGroups = 33; // for int4: this many rows are three groups in lanes
constexpr int64_t kFewestInGroup = Vec::kBf16Dot ? least(14, kManyRowsInTiles) : kManyRowsInTiles;
constexpr int64_t kFewestInPanels = least(kFewestInGroup, least(kManyRowsInTiles, kManyRowsInTerms));

// Whether rows are multiplied by panels; never below kFewestInPanels, always from kManyRows on.
inline bool many(int64_t rows, const Matrix& m) {
    if (wants_operand(m, rows) && operand_terms(m) == kMostTerms && !in_bytes(m))
        return rows >= kManyRowsInTerms;
    if (in_grouped_codes(m))
        return rows >= kManyRowsInGroups;
#if defined(SLIPSTREAM_BF16_DOT) && !defined(SLIPSTREAM_AMX)
    if (in_code_lanes(m, rows))
        return false;
#endif
    if (in_codes(m))
        return rows >= kManyRowsInBytes || (rows >= kFewestInGroup && rows <= kGroup);
    if (m.dtype != kBfloat16 || m.format != kPlain)
        return rows >= kManyRows;
#ifdef SLIPSTREAM_AMX
    if (fits_lanes(m, rows))
        return false;
#endif
    return rows >= kManyRowsInTiles;
}

constexpr int64_t kMostPanelRows = most(FloatWord::kPanelRows, Bf16Unit::kPanelRows);

constexpr int64_t kProductFloats = kMostPanelRows * (kTokensAtOnce + 3 * kGroup + kGroup);
// Bytes of scratch that any product needs per thread.
constexpr int64_t kProductBytes = most(FloatWord::kPanelBytes, Bf16Unit::kPanelBytes) +
                                  kProductFloats * static_cast<int64_t>(sizeof(float));

// Calls `f` with the word type that multiplies the matrix.
template <class F>
inline void with_word(const Matrix& m, F f) {
#ifdef SLIPSTREAM_BF16_DOT
    if (in_codes(m))
        return f(ByteUnit());
    if (in_grouped_codes(m))
        return f(GroupedUnit());
#else
    if (in_words(m))
        return with_lanes(m, [&](auto way) { f(WholeWord<decltype(way)>()); });
#endif
    if (Vec::kBf16Dot && m.dtype == kBfloat16)
        f(Bf16Unit());
    else
        f(FloatWord());
}

// Whether the input of a matrix is packed from complete float32 rows, because it is rounded relative to each
// row's largest value.
inline bool packs_whole(const Matrix& m) {
#ifdef SLIPSTREAM_BF16_DOT
    return m.input_bits != 0;
#else
    return m.input_bits != 0 || in_words(m);
#endif
}

// A finished part of a product: outputs [begin, begin + outputs) of `tokens` tokens from `token` on. Output j
// of token t is c[j * stride + t], and up[j * stride + t] for the second half of a product that has two; both
// may be overwritten. The buffers extend to the next multiple of kGroup rows and tokens.
struct Piece {
    int64_t begin, outputs, token, tokens;
    float *c, *up;
    int64_t stride;
    float* turned; // scratch for kGroup * kMostPanelRows
};

// One matrix times packed tokens, shared out to a team panel by panel.
template <class U>
class Product {
public:
    using Item = typename U::Item;

    // `second`: 0, or the distance in rows from an output to the one that belongs to it (gate and up).
    Product(const Matrix& m, int64_t outputs, int64_t second, int64_t tokens, int threads)
        : m_(m), outputs_(outputs), second_(second), tokens_(tokens), halves_(second ? 2 : 1) {
        const int64_t inputs = padded<U>(m.inputs);
        const int64_t groups = ceil_div(tokens, kGroup), most_groups = kTokensAtOnce / kStep * U::kGroups;
        int64_t chunks = ceil_div(groups, most_groups);
        const int64_t passes = ceil_div(inputs, kDeepest);
        deep_ = ceil_div(ceil_div(inputs, passes), kDecoded) * kDecoded;
        pitch_ = Panel::pitch(deep_);
        width_ = U::kBlock && groups >= 2 * U::kGroups ? blocked(chunks, threads) : evened(chunks, threads);
        // A thread with one more task than the others would keep them waiting: shorter chunks even out the
        // load.
        if (threads > 1 && ceil_div(outputs, width_) * chunks % threads && groups >= 8 * U::kGroups)
            chunks *= 2;
        chunk_ = ceil_div(ceil_div(groups, chunks), U::kGroups) * kStep;
        stride_ = deep_ < inputs ? chunk_ : kStep;
        panels_ = ceil_div(outputs, width_);
        tasks_ = panels_ * ceil_div(tokens, chunk_);
    }

    // Calls `finish(piece)` for all outputs of all tokens. While the last panels of this matrix are
    // multiplied, the first panels of the following matrix are prefetched, because nothing else loads them
    // from memory in time.
    template <class F>
    void run(const void* packed, Team& team, char* own, F finish, const Following& next = {}) const {
        [[maybe_unused]] typename Panel::Session session;
        each(team, tasks_, 1, [&](int64_t task, int64_t) {
            work(static_cast<const Item*>(packed), task, own, team.size(), finish, next);
        });
    }

    Following as_following() const { return {&m_, outputs_, second_, width_}; }

private:
    using Panel = typename PanelFor<U>::Type;
    static constexpr int64_t kDecoded = most(line_items<U>(), kPackedBlock); // where passes may begin
    static constexpr int64_t kRowItems = U::kPanelBytes / U::kDeepRows / static_cast<int64_t>(sizeof(Item));
    static constexpr int64_t kDeepest =
        (kRowItems - line_items<U>()) * U::kSpan / (U::kSpan + U::kBetweenRow) / kDecoded * kDecoded;
    static constexpr int64_t kStep = U::kGroups * kGroup; // tokens that pass a panel together

    template <class F>
    void work(const Item* packed, int64_t task, char* own, int ahead_by, F& finish,
              const Following& next) const {
        auto* panel = reinterpret_cast<Item*>(own);
        auto* c = reinterpret_cast<float*>(own + U::kPanelBytes);
        [[maybe_unused]]
        typename U::Sum sums[2][U::kPanelRows] =
            {}; // of the rows of both halves, where tokens have zero points
        const int64_t begin = task % panels_ * width_, n = least(width_, outputs_ - begin);
        const int64_t token = task / panels_ * chunk_, end = least(tokens_, token + chunk_);
        const int64_t inputs = padded<U>(m_.inputs), items = packed_items<U>(inputs);
        Ahead ahead = look_ahead(task + ahead_by, ceil_div(end - token, kStep), next);
        alignas(64) float starts[2][U::kPanelRows] = {};
        const bool settled = Panel::kStarts && !U::kRounds && !row_factors(m_); // sums start with the bias
        for (int64_t half = 0; settled && m_.bias && half < halves_; ++half)
            read_row(m_.bias, m_.bias_dtype, begin + half * second_, starts[half], n);
        for (int64_t from = 0; from < inputs; from += deep_) {
            const int64_t deep = least(deep_, m_.inputs - from);
            const Item* rows[2];
            int64_t pitches[2] = {pitch_, pitch_};
            for (int64_t half = 0; half < halves_; ++half) {
                rows[half] = Panel::here(m_, begin + half * second_, n, from, deep, pitches + half);
                if (!rows[half]) {
                    rows[half] = panel + half * width_ * pitch_;
                    Panel::bring(m_, begin + half * second_, n, from, deep, panel + half * width_ * pitch_,
                                 pitch_);
                }
#ifdef SLIPSTREAM_BF16_DOT
                if constexpr (U::kRounds && U::kZeros)
                    sum_rows(rows[half], pitches[half], begin + half * second_, n, from, deep, sums[half]);
#endif
            }
            const int64_t words = least(deep_, inputs - from) / U::kItems;
            for (int64_t t = token; t < end; t += kStep) {
                const int64_t count = least(end - t, kStep), groups = ceil_div(count, kGroup);
                float* at = stride_ == chunk_ ? c + t - token : c;
                for (int64_t half = 0; half < halves_; ++half) {
                    float* part = at + half * width_ * stride_;
                    Panel::multiply({rows[half], pitches[half], n,
                                     packed + t * items + packed_items<U>(from) * kGroup, items * kGroup,
                                     groups, words, from == 0, starts[half], part, stride_, &ahead});
                    if (from + deep_ < inputs || settled)
                        continue;
                    if constexpr (U::kRounds)
                        this->settle_codes(begin + half * second_, n,
                                           packed_grids<U>(packed, tokens_, inputs) + t, groups * kGroup,
                                           sums[half], part);
                    else
                        settle(begin + half * second_, n, groups * kGroup, part);
                }
                if (from + deep_ >= inputs)
                    finish(Piece{begin, n, t, count, at, second_ ? at + width_ * stride_ : nullptr, stride_,
                                 c + U::kPanelRows * (kTokensAtOnce + kStep)});
            }
        }
    }

    // The number of rows of a panel, such that every thread has about a dozen tasks.
    int64_t evened(int64_t chunks, int64_t threads) const {
        int64_t width = U::kDeepRows / halves_;
        while (width > kGroup && ceil_div(outputs_, width) * chunks < 12 * threads)
            width /= 2;
        return width;
    }

    // The number of rows of a panel in whole blocks, such that the longest share of any thread is minimal.
    // Each panel reads the tokens from L2, about half as fast as blocks consume them, which is modelled as
    // kTokensAsRows additional rows.
    int64_t blocked(int64_t chunks, int64_t threads) const {
        constexpr int64_t kTokensAsRows = 16, kBlock = most(U::kBlock, 1);
        const int64_t room = U::kPanelBytes / (pitch_ * static_cast<int64_t>(sizeof(Item)));
        int64_t width = 0, best = 0;
        for (int64_t w = least(U::kPanelRows, room) / halves_ / kBlock * kBlock; w > 0; w -= kBlock) {
            const int64_t panels = ceil_div(outputs_, w), tasks = panels * chunks;
            // rows missing in the last panel
            const int64_t missing = (tasks - 1) % threads ? 0 : panels * w - outputs_;
            const int64_t share = ceil_div(tasks, threads) * (w + kTokensAsRows) - missing;
            if (width == 0 || share < best)
                width = w, best = share;
        }
        return width;
    }

    // What this thread will probably work on next: a task of this product, or one of the next. It is
    // prefetched completely by the end of the current task.
    Ahead look_ahead(int64_t task, int64_t steps, const Following& next) const {
        const Following from = task < tasks_ ? as_following() : next;
        const int64_t begin = task < tasks_ ? task % panels_ * width_ : (task - tasks_) * next.width;
        const int64_t n = least(from.width, from.outputs - begin);
        if (n <= 0)
            return {};
        Ahead ahead = rows_ahead(*from.m, begin, n);
        if (from.second) {
            const Ahead second = rows_ahead(*from.m, begin + from.second, n);
            ahead.then = second.at;
            ahead.then_end = second.end;
        }
        const int64_t passes = ceil_div(padded<U>(m_.inputs), deep_);
        const int64_t times = passes * steps * halves_ * Panel::blocks(width_, deep_ / U::kItems);
        ahead.lines = (ahead.end - ahead.at + ahead.then_end - ahead.then) / 64 / times + 1;
        return ahead;
    }

    float bias(int64_t row) const {
        float value = 0.0f;
        if (m_.bias)
            read_row(m_.bias, m_.bias_dtype, row, &value, 1);
        return value;
    }

    // Applies the row multipliers of a packed matrix and adds the bias.
    void settle(int64_t row, int64_t n, int64_t tokens, float* c) const {
        const float* factors = row_factors(m_);
        if (!factors && !m_.bias)
            return;
        for (int64_t j = 0; j < n; ++j) {
            const Vec factor = Vec::set(factors ? factors[row + j] : 1.0f), shift = Vec::set(bias(row + j));
            for (int64_t t = 0; t < tokens; t += kGroup)
                fma(Vec::load(c + j * stride_ + t), factor, shift).store(c + j * stride_ + t);
        }
    }

#ifdef SLIPSTREAM_BF16_DOT
    // Computes what the zero points of tokens are multiplied by for n rows, accumulated over the passes: sums
    // of the codes, or of the weights that the codes stand for.
    void sum_rows(const Item* panel, int64_t pitch, int64_t row, int64_t n, int64_t from, int64_t deep,
                  typename U::Sum* sums) const {
        const auto* codes = static_cast<const uint8_t*>(m_.planes[kCodes]) + row * m_.inputs + from;
        for (int64_t j = 0; j < n; ++j) {
            sums[j] = from ? sums[j] : 0;
            if constexpr (std::is_same<U, GroupedWord>::value)
                sums[j] += m_.input_zero ? GroupedPanel::sum(panel + j * pitch, deep) : 0;
            else
                sums[j] += sum_codes(codes + j * m_.inputs, deep);
        }
    }
#endif

    // Turns sums of products of codes into results.
    void settle_codes(int64_t row, int64_t n, const float* scales, int64_t tokens,
                      const typename U::Sum* sums, float* c) const {
        const float* zeros = scales + ceil_div(tokens_, kGroup) * kGroup;
        for (int64_t j = 0; j < n; ++j) {
            const Vec factor = Vec::set(row_factors(m_)[row + j]), shift = Vec::set(bias(row + j));
            for (int64_t t = 0; t < tokens; t += kGroup) {
                float* at = c + j * stride_ + t;
                const Vec value = U::less_zeros(Vec::load(at), Vec::load(zeros + t), sums[j]);
                fma(value * Vec::load(scales + t), factor, shift).store(at);
            }
        }
    }

    const Matrix& m_;
    const int64_t outputs_, second_, tokens_, halves_;
    int64_t width_, deep_, pitch_, chunk_, stride_, panels_, tasks_;
};

// The panels to prefetch for a matrix that follows a product of `tokens` rows; empty unless the rows are
// multiplied with it by panels as well.
inline Following following(const Matrix& m, int64_t outputs, int64_t second, int64_t tokens, int threads) {
    Following next;
    if (many(tokens, m))
        with_word(m, [&](auto unit) {
            next = Product<decltype(unit)>(m, outputs, second, tokens, threads).as_following();
        });
    return next;
}

// Finishes a piece in row-major order: calls `row(token, values)` with the piece's outputs of one token.
template <class F>
inline void each_row(const Piece& p, F row) {
    for (int64_t t = 0; t < p.tokens; t += kGroup) {
        for (int64_t j = 0; j < p.outputs; j += kGroup)
            transpose(p.c + j * p.stride + t, p.stride, p.turned + j, kMostPanelRows);
        for (int64_t i = 0; i < least(kGroup, p.tokens - t); ++i)
            row(p.token + t + i, p.turned + i * kMostPanelRows);
    }
}

// Writes a piece in row-major order: output j of token t to out[t * stride + j], both counted from 0.
template <class T>
inline void turn_piece(const Piece& p, T* out, int64_t stride) {
    for (int64_t t = 0; t < p.tokens; t += kGroup) {
        const int64_t tokens = least(kGroup, p.tokens - t);
        const float* c = p.c + t;
        T* to = out + (p.token + t) * stride + p.begin;
        int64_t j = 0;
        for (; tokens == kGroup && j + 2 * kGroup <= p.outputs; j += 2 * kGroup)
            transpose_two(c + j * p.stride, p.stride, to + j, stride);
        for (; j < p.outputs; j += kGroup) {
            const int64_t outputs = least(kGroup, p.outputs - j);
            if (tokens == kGroup && outputs == kGroup) {
                transpose(c + j * p.stride, p.stride, to + j, stride);
                continue;
            }
            transpose(c + j * p.stride, p.stride, p.turned, kGroup);
            for (int64_t i = 0; i < tokens; ++i)
                copy_row(p.turned + i * kGroup, to + i * stride + j, outputs);
        }
    }
}

// Packs a piece as input of the next matrix, which `U` multiplies and which has as many inputs as the product
// has outputs.
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
