// The feed-forward: two matrices with an activation between them. With many rows, the output of the
// activation is packed for the second matrix immediately, and is never stored in float32 as a whole.
#pragma once

namespace slipstream {
namespace {

// The two matrices and the activation between them.
struct FeedForward {
    const Matrix &first, &last;
    int64_t width; // inputs of `last`
    int32_t activation;
    bool gated, gate_last; // gate_last: the gate is the second half of the output of `first`
};

inline bool mixes(const Block& b) {
    return b.branches != kOnlyFeed;
}
inline bool feeds(const Block& b) {
    return b.branches != kOnlyAttention;
}
inline bool attends(const Block& b) {
    return mixes(b) && (!b.recurrence || b.beside);
}

// Width of the output of a block's attention or mixer, before the last product.
inline int64_t joined_of(const Block& b) {
    const int64_t mixed = mixes(b) && b.recurrence ? b.recurrence->out.inputs : 0;
    return most(mixed, attends(b) ? b.attn_out.inputs : 0);
}

// The dense feed-forward of all tokens; its width is 0 if the block has only routed experts.
inline FeedForward feed_of(const Block& b) {
    const Moe* moe = b.moe;
    return {moe ? moe->shared_in : b.mlp_in,
            moe ? moe->shared_out : b.mlp_out,
            moe ? moe->shared : b.ffn,
            b.activation,
            b.gated != 0,
            false};
}

// Whether the rows pass through both matrices by panels.
inline bool feeds_many(const FeedForward& f, int64_t rows) {
    return many(rows, f.first) && many(rows, f.last);
}

// Scratch for few rows.
struct FewScratch {
    // `width`: maximum inputs of the second matrix.
    void take(Scratch& scratch, int64_t width, int64_t rows) {
        inner = scratch.part<float>(rows * width);
        rounded_inner = scratch.part<Bf16>(Vec::kBf16Dot ? rows * width : 0);
    }
    float* inner = nullptr;
    Bf16* rounded_inner = nullptr;
};

// Feed-forward of few rows: calls `finish(inner, begin, end)` for ranges of the second matrix's outputs, with
// the operand that it multiplies. `products` has kMostColumns floats per row of a thread's own.
template <class F>
inline void feed_few(const FeedForward& f, const Rows& rows, const ProductRoom& products,
                     const FewScratch& scratch, Team& team, int rank, F finish) {
    char* operands = products.operands_of(rank);
    float* own = products.own_floats_of(rank);
    const int64_t width = f.width;
    const Operand in = prepare(rows, f.first, operands);
    Bf16* rounded = rounds(f.last, rows.count) ? scratch.rounded_inner : nullptr;
    each_in_runs(team, rank, width, grain(f.first, width, team.size()), [&](int64_t begin, int64_t end) {
        const int64_t n = end - begin;
        multiply(in, f.first, begin, end, scratch.inner + begin, width);
        if (f.gated)
            multiply(in, f.first, width + begin, width + end, own, n);
        for (int64_t t = 0; t < rows.count; ++t) {
            float* row = scratch.inner + t * width + begin;
            (rounded ? activate_rounded_row : activate_row)(f.activation, row,
                                                            f.gated ? own + t * n : nullptr, n);
            if (rounded)
                copy_row(row, rounded + t * width + begin, n);
        }
    });
    const Operand inner = prepare({scratch.inner, rounded, width, rows.count}, f.last, operands);
    each_in_runs(team, rank, f.last.outputs, grain(f.last, f.last.outputs, team.size()),
                 [&](int64_t begin, int64_t end) { finish(inner, begin, end); });
}

// Multiply packed rows with the first matrix, apply the activation, and pack the result for the second one.
// If that one packs whole rows, the result is left in float32, by tokens or in the layout of
// rounded_hidden.h.
inline void feed_inner(const FeedForward& f, const char* packed, int64_t tokens, char* inner, Team& team,
                       char* own) {
    float* whole = reinterpret_cast<float*>(inner);
    const bool codes = packs_whole(f.last);
    // Rounding to codes uses scales of its own; only values that become bfloat16 are certain to be rounded to
    // it.
    const bool rounds = Vec::kBf16Dot && f.last.dtype == kBfloat16 && !codes;
    const auto finish = [&](Piece piece) {
        if (f.gate_last)
            std::swap(piece.c, piece.up);
        for (int64_t j = 0; j < piece.outputs; ++j)
            (rounds ? activate_rounded_row : activate_row)(f.activation, piece.c + j * piece.stride,
                                                           f.gated ? piece.up + j * piece.stride : nullptr,
                                                           ceil_div(piece.tokens, kGroup) * kGroup);
        with_word(f.last, [&](auto next) {
            using N = decltype(next);
            if constexpr (kKeeps<N>)
                return keep_piece(piece, f.width, whole);
            if constexpr (!N::kRounds)
                if (!codes)
                    return pack_piece<N>(piece, f.width, inner);
            each_row(piece, [&](int64_t t, const float* values) {
                std::memcpy(whole + t * f.width + piece.begin, values,
                            static_cast<size_t>(piece.outputs) * sizeof(float));
            });
        });
    };
    with_word(f.first, [&](auto unit) {
        using U = decltype(unit);
        const Product<U> product(f.first, f.width, f.gated ? f.width : 0, tokens, team.size());
        product.run(packed, team, own, finish, following(f.last, f.last.outputs, 0, tokens, team.size()));
    });
}

// Feed-forward of many rows `(rows, C)`: calls `finish(piece)` for all outputs of the second matrix. `packed`
// has room for the inputs of the first matrix and, if the second one packs whole rows, for the inputs of that
// as well. `next` is the matrix that is multiplied afterwards.
template <class T, class F>
inline void feed_many(const FeedForward& f, const T* x, int64_t rows, char* packed, char* inner, Team& team,
                      char* own, F finish, const Following& next = {}) {
    with_word(f.first,
              [&](auto unit) { pack_rows<decltype(unit)>(x, dtype_of(x), rows, f.first, packed, team); });
    feed_inner(f, packed, rows, inner, team, own);
    with_word(f.last, [&](auto unit) {
        using U = decltype(unit);
        const bool whole = packs_whole(f.last);
        if constexpr (kKeeps<U>)
            pack_kept<U>(reinterpret_cast<const float*>(inner), rows, f.last, packed, team);
        else if (whole)
            pack_rows<U>(inner, kFloat32, rows, f.last, packed, team);
        const Product<U> product(f.last, f.last.outputs, 0, rows, team.size());
        product.run(whole ? packed : inner, team, own, finish, next);
    });
}

// Rows that pass through both matrices before the next ones do, so that the intermediate rows stay in the
// second-level cache.
constexpr int64_t kFeedRows = 512;

struct FeedScratch {
    FeedScratch(const FeedCall& call, char* base, int threads) {
        const int64_t rows = least(call.rows, kFeedRows);
        Scratch scratch(base);
        const bool whole = packs_whole(call.last);
        packed =
            scratch.part<char>(packed_bytes(rows, most(call.first.inputs, whole ? call.last.inputs : 0)));
        inner = scratch.part<char>(packed_bytes(rows, call.last.inputs));
        own = scratch.part<char>(kProductBytes * threads);
        bytes = scratch.used();
    }
    char *packed, *inner, *own;
    int64_t bytes;
};

inline int64_t feed_bytes(const FeedCall& call, int threads) {
    return FeedScratch(call, nullptr, threads).bytes;
}

inline void feed(const FeedCall& call, char* base, Team& team, int rank) {
    const FeedScratch scratch(call, base, team.size());
    const FeedForward f = {call.first,      call.last,       call.last.inputs,
                           call.activation, call.gated != 0, call.gate_last != 0};
    char* own = scratch.own + kProductBytes * rank;
    with_dtype(call.dtype, [&](auto* type) {
        using T = typename std::remove_pointer<decltype(type)>::type;
        for (int64_t t = 0; t < call.rows; t += kFeedRows) {
            const int64_t rows = least(kFeedRows, call.rows - t);
            const T* x = static_cast<const T*>(call.x) + t * call.first.inputs;
            T* out = static_cast<T*>(call.out) + t * call.last.outputs;
            feed_many(f, x, rows, scratch.packed, scratch.inner, team, own,
                      [&](const Piece& piece) { turn_piece(piece, out, call.last.outputs); });
        }
    });
}

} // namespace
} // namespace slipstream
