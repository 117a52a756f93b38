// The third branch of blocks that get an input of their own for each token (`Inputs`).
//
// Source: Gemma 3n's and Gemma 4's per-layer embeddings, as transformers computes them.
#pragma once

namespace slipstream {
namespace {

class InputBranch {
public:
    // The largest P of the blocks; 0 if none has such a branch.
    static int64_t widest(const StackCall& call) {
        int64_t width = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            width = most(width, call.blocks[i].inputs ? call.blocks[i].inputs->width : 0);
        return width;
    }

    void take(Scratch& scratch, const StackCall& call, bool rounds) {
        const int64_t tokens = call.step.tokens, width = widest(call);
        gates_ = scratch.part<float>(tokens * width);
        rounded_ = scratch.part<Bf16>(rounds ? tokens * width : 0);
    }

    // Writes the branch's output, `(T, C)`, before its norm. Rows x are rounded as well where the gate's
    // matrix reads them that way.
    void run(const StackCall& call, int64_t layer, const Rows& x, float* out, const ProductRoom& products,
             Team& team, int rank, const Following& middle, const Following& next) const {
        const Block& b = call.blocks[layer];
        const int64_t width = b.inputs->width, tokens = x.count;
        project(products, x, b.inputs->gate, gates_, team, rank, middle);
        const bool rounds = rounds_rows(b.inputs->out, tokens);
        each_one(team, tokens, [&](int64_t t) {
            float* row = gates_ + t * width;
            activate_row(b.activation, row, call.inputs + t * call.inputs_stride + layer * width, width);
            if (rounds)
                copy_row(row, rounded_ + t * width, width);
        });
        project(products, {gates_, rounds ? rounded_ : nullptr, width, tokens}, b.inputs->out, out, team,
                rank, next);
    }

private:
    float* gates_ = nullptr;
    Bf16* rounded_ = nullptr;
};

} // namespace
} // namespace slipstream
