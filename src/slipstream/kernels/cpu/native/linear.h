// A single linear layer: by panels if there are many rows, else by runs of outputs.
#pragma once

namespace slipstream {
namespace {

struct LinearScratch {
    LinearScratch(const LinearCall& call, char* base, int threads) {
        const int64_t items = call.rows * call.weight.inputs;
        Scratch scratch(base);
        if (many(call.rows, call.weight)) {
            packed = scratch.part<char>(packed_bytes(call.rows, call.weight.inputs));
            own_bytes = kProductBytes;
        } else {
            full = scratch.part<float>(items);
            rounded = scratch.part<Bf16>(Vec::kBf16Dot ? items : 0);
            own_bytes = call.rows * 128 * static_cast<int64_t>(sizeof(float));
            operand_size = operand_bytes(call.weight.inputs, call.rows);
            operands = scratch.part<char>(operand_size * threads);
        }
        own = scratch.part<char>(own_bytes * threads);
        bytes = scratch.used();
    }
    float* full = nullptr;
    Bf16* rounded = nullptr;
    char *packed = nullptr, *operands = nullptr, *own;
    int64_t own_bytes, operand_size = 0, bytes;
};

inline int64_t linear_bytes(const LinearCall& call, int threads) {
    return LinearScratch(call, nullptr, threads).bytes;
}

inline void linear_many(const LinearCall& call, const LinearScratch& scratch, Team& team, int rank) {
    const Matrix& m = call.weight;
    with_word(m, [&](auto unit) {
        using U = decltype(unit);
        pack_rows<U>(call.x, call.dtype, call.rows, m, scratch.packed, team);
        const Product<U> product(m, m.outputs, 0, call.rows, team.size());
        product.run(scratch.packed, team, scratch.own + scratch.own_bytes * rank, [&](const Piece& piece) {
            with_dtype(call.dtype, [&](auto* type) {
                turn_piece(piece, static_cast<decltype(type)>(call.out), m.outputs);
            });
        });
    });
}

inline void linear(const LinearCall& call, char* base, Team& team, int rank) {
    const LinearScratch scratch(call, base, team.size());
    if (many(call.rows, call.weight)) {
        linear_many(call, scratch, team, rank);
        return;
    }
    const Matrix& m = call.weight;
    const bool rounded = rounds(m, call.rows);
    each_one(team, call.rows, [&](int64_t r) {
        float* row = scratch.full + r * m.inputs;
        read_row(call.x, call.dtype, r * m.inputs, row, m.inputs);
        if (rounded)
            copy_row(row, scratch.rounded + r * m.inputs, m.inputs);
    });
    float* own = reinterpret_cast<float*>(scratch.own + scratch.own_bytes * rank);
    const Rows rows = {scratch.full, rounded ? scratch.rounded : nullptr, m.inputs, call.rows};
    const Operand x = prepare(rows, m, scratch.operands + scratch.operand_size * rank);
    each_in_runs(team, rank, m.outputs, grain(m, m.outputs, team.size()), [&](int64_t begin, int64_t end) {
        const int64_t n = end - begin;
        multiply(x, m, begin, end, own, n);
        for (int64_t i = 0; i < call.rows; ++i)
            write_row(own + i * n, call.out, call.dtype, i * m.outputs + begin, n);
    });
}

} // namespace
} // namespace slipstream
