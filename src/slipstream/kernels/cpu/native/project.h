// Products of a step's rows with a matrix, by panels if there are many rows, else by runs of outputs.
#pragma once

namespace slipstream {
namespace {

// Whether rows are rounded to bfloat16 in place; rows packed into panels are not.
inline bool rounds_rows(const Matrix& m, int64_t tokens) {
    return !many(tokens, m) && rounds(m, tokens);
}

// What the products of a call need at most.
struct ProductSizes {
    int64_t rows, packed_inputs; // packed into panels
    int64_t few, inputs;         // rows and inputs of products of few rows
    int64_t own_floats;          // of a thread, for other use between the products
};

// Scratch memory of products, which follow one another.
struct ProductRoom {
    void take(Scratch& scratch, const ProductSizes& sizes, int threads) {
        const bool panels = sizes.rows >= kFewestInPanels;
        own_bytes = most(panels ? kProductBytes : 0, ceil_div(sizes.own_floats, 16) * 64);
        own = scratch.part<char>(own_bytes * threads);
        if (panels)
            packed = scratch.part<char>(packed_bytes(sizes.rows, sizes.packed_inputs));
        operand_size = operand_bytes(sizes.inputs, sizes.few);
        operands = scratch.part<char>(operand_size * threads);
    }
    char* own_of(int rank) const { return own + own_bytes * rank; }
    float* own_floats_of(int rank) const { return reinterpret_cast<float*>(own_of(rank)); }
    char* operands_of(int rank) const { return operands + operand_size * rank; }
    char *packed = nullptr, *own = nullptr, *operands = nullptr;
    int64_t own_bytes = 0, operand_size = 0;
};

// out = x times a matrix, row by row. Rows of `x` are adjacent, and rounded as well where `rounds_rows`; the
// panels of `next` are prefetched near the end.
inline void project(const ProductRoom& room, const Rows& x, const Matrix& m, float* out, Team& team, int rank,
                    const Following& next = {}) {
    if (many(x.count, m)) {
        with_word(m, [&](auto unit) {
            using U = decltype(unit);
            pack_rows<U>(x.full, kFloat32, x.count, m, room.packed, team);
            const Product<U> product(m, m.outputs, 0, x.count, team.size());
            product.run(
                room.packed, team, room.own_of(rank),
                [&](const Piece& piece) { turn_piece(piece, out, m.outputs); }, next);
        });
        return;
    }
    // Each thread prepares the operand for itself from the complete rows.
    const Operand in = prepare(x, m, room.operands_of(rank));
    each_in_runs(team, rank, m.outputs, grain(m, m.outputs, team.size()),
                 [&](int64_t begin, int64_t end) { multiply(in, m, begin, end, out + begin, m.outputs); });
}

} // namespace
} // namespace slipstream
