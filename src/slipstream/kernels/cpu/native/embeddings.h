// Rows of embedding tables, and the blocks' own inputs (`Inputs`), which a model makes of two of them.
#pragma once

namespace slipstream {
namespace {

// Writes a token's row, times a scale.
inline void look_up(const Matrix& m, int64_t id, float scale, float* row) {
    if (m.format != kPlain) {
        decode(m, id, 1, 0, m.inputs, row, m.inputs);
        scale *= row_factors(m) ? row_factors(m)[id] : 1.0f;
    } else {
        read_row(m, id, row);
    }
    if (scale != 1.0f)
        for (int64_t j = 0; j < m.inputs; ++j)
            row[j] *= scale;
}

// The inputs of all blocks of a model: the sum of a projection of each token's embedding, which is normalized
// block by block, and of the token's row in a second table.
class InputsOfBlocks {
public:
    void take(Scratch& scratch, const Frame& frame, int64_t blocks, int64_t tokens, int threads) {
        const Matrix& m = frame.inputs_project;
        all_ = m.outputs, width_ = all_ / blocks, hidden_ = m.inputs, tokens_ = tokens;
        if (!all_)
            return;
        rows_ = scratch.part<float>(tokens * hidden_);
        rounded_ = scratch.part<Bf16>(rounds_rows(m, tokens) ? tokens * hidden_ : 0);
        inputs_ = scratch.part<float>(tokens * all_);
        looked_up_ = scratch.part<float>(threads * all_);
        products_.take(scratch, {tokens, hidden_, tokens < kManyRows ? tokens : 0, hidden_, 0}, threads);
    }

    bool any() const { return all_ > 0; }

    // `(T, L * P)`.
    const float* inputs() const { return inputs_; }
    int64_t stride() const { return all_; }

    // The embedding of token t, `(C,)`.
    const float* row(int64_t t) const { return rows_ + t * hidden_; }

    // `token(t)` is the id of token t.
    template <class F>
    void run(const Frame& frame, F token, Team& team, int rank) const {
        const Matrix& m = frame.inputs_project;
        const bool rounds = rounds_rows(m, tokens_);
        each_one(team, tokens_, [&](int64_t t) {
            look_up(frame.embed, token(t), frame.embed_scale, rows_ + t * hidden_);
            if (rounds)
                copy_row(rows_ + t * hidden_, rounded_ + t * hidden_, hidden_);
        });
        project(products_, {rows_, rounds ? rounded_ : nullptr, hidden_, tokens_}, m, inputs_, team, rank);
        float* own = looked_up_ + rank * all_;
        const auto row = [&](int64_t id) { return frame.inputs_rows && id >= frame.inputs_rows ? 0 : id; };
        const Vec both = Vec::set(frame.inputs_scale);
        each_one(team, tokens_, [&](int64_t t) {
            float* out = inputs_ + t * all_;
            look_up(frame.inputs_embed, row(token(t)), frame.inputs_embed_scale, own);
            multiply_row(out, all_, frame.inputs_project_scale);
            for (int64_t j = 0; j < all_; j += width_)
                norm_row(out + j, out + j, width_, frame.inputs_norm);
            for (int64_t j = 0; j < all_; j += Vec::kWidth) {
                const int64_t n = least(all_ - j, Vec::kWidth);
                ((Vec::load(out + j, n) + Vec::load(own + j, n)) * both).store(out + j, n);
            }
        });
    }

private:
    int64_t all_ = 0, width_ = 0, hidden_ = 0, tokens_ = 0;
    ProductRoom products_;
    Bf16* rounded_ = nullptr;
    float *rows_ = nullptr, *inputs_ = nullptr, *looked_up_ = nullptr;
};

} // namespace
} // namespace slipstream
