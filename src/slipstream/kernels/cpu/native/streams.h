// Blocks with several streams of states per token (`Streams`), and feed-forwards with sparse gates.
//
// Source: Gemma 3n, as transformers computes it; Baykal et al. 2023 (arXiv 2301.13310).
#pragma once

namespace slipstream {
namespace {

// The product of a row with row `o` of a dense matrix that is not transposed.
inline float product_with_row(const Matrix& m, int64_t o, const float* x) {
    const Run* run = m.runs;
    for (; o >= run->rows; ++run)
        o -= run->rows;
    float product = 0;
    with_dtype(m.dtype, [&](auto* type) {
        const auto* w = static_cast<decltype(type)>(const_cast<void*>(run->data)) + o * run->stride;
        Vec sums[2] = {Vec::set(0), Vec::set(0)};
        int64_t j = 0;
        for (; j + 2 * Vec::kWidth <= m.inputs; j += 2 * Vec::kWidth)
            for (int i = 0; i < 2; ++i)
                sums[i] =
                    fma(Vec::load(w + j + i * Vec::kWidth), Vec::load(x + j + i * Vec::kWidth), sums[i]);
        for (; j < m.inputs; j += Vec::kWidth) {
            const int64_t n = least(m.inputs - j, Vec::kWidth);
            sums[0] = fma(Vec::load(w + j, n), Vec::load(x + j, n), sums[0]);
        }
        product = (sums[0] + sums[1]).sum();
    });
    return product;
}

// The number of streams of a call's blocks; 1 if these have no streams.
inline int64_t streams_of(const StackCall& call) {
    return call.blocks[0].streams ? call.blocks[0].streams->count : 1;
}

// The streams of all tokens, and the narrow branch beside attention.
class StreamRows {
public:
    static constexpr int64_t kMost = 8;

    void take(Scratch& scratch, const StackCall& call, bool rounds) {
        const int64_t tokens = call.step.tokens;
        count_ = streams_of(call), hidden_ = call.blocks[0].hidden;
        if (!any())
            return;
        const int64_t rank = widest(call);
        rows_ = scratch.part<float>(tokens * count_ * hidden_);
        narrow_ = scratch.part<float>(tokens * hidden_);
        low_ = scratch.part<float>(tokens * rank);
        rounded_low_ = scratch.part<Bf16>(rounds ? tokens * rank : 0);
    }

    // The largest R of the blocks; 0 if these have no streams.
    static int64_t widest(const StackCall& call) {
        int64_t rank = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            rank = most(rank, call.blocks[i].streams ? call.blocks[i].streams->rank : 0);
        return rank;
    }

    bool any() const { return count_ > 1; }

    // The streams of a token, `(S, C)`.
    float* row(int64_t t) const { return rows_ + t * count_ * hidden_; }

    // Predicts a token's streams in place; x receives the active one.
    void predict(const Block& b, int64_t t, float* x) const {
        const Streams& s = *b.streams;
        float routed[kMost], factors[kMost * kMost];
        float* rows = row(t);
        route(b, rows + s.active * hidden_, x, routed);
        for (int64_t i = 0; i < count_ * count_; ++i)
            factors[i] = product_with_row(s.predict, i, routed);
        for (int64_t j = 0; j < hidden_; j += Vec::kWidth) {
            const int64_t n = least(hidden_ - j, Vec::kWidth);
            Vec before[kMost];
            for (int64_t i = 0; i < count_; ++i)
                before[i] = Vec::load(rows + i * hidden_ + j, n);
            for (int64_t q = 0; q < count_; ++q) {
                Vec sum = before[q];
                for (int64_t i = 0; i < count_; ++i)
                    sum = fma(Vec::set(factors[q * count_ + i]), before[i], sum);
                sum.store(rows + q * hidden_ + j, n);
            }
        }
        std::memcpy(x, rows + s.active * hidden_, static_cast<size_t>(hidden_) * sizeof(float));
    }

    // Computes the narrow branch of normed rows, which are rounded as well where its first matrix reads them
    // that way.
    void run(const Block& b, const Rows& normed, const ProductRoom& products, Team& team, int rank,
             const Following& middle, const Following& next) const {
        const Streams& s = *b.streams;
        const bool rounds = rounds_rows(s.narrow_out, normed.count);
        project(products, normed, s.narrow_in, low_, team, rank, middle);
        if (rounds)
            each_one(team, normed.count,
                     [&](int64_t t) { copy_row(low_ + t * s.rank, rounded_low_ + t * s.rank, s.rank); });
        project(products, {low_, rounds ? rounded_low_ : nullptr, s.rank, normed.count}, s.narrow_out,
                narrow_, team, rank, next);
    }

    // x = (x + normed + the narrow branch) / sqrt(2).
    void join(const Block& b, int64_t t, const float* normed, float* x) const {
        float* narrow = narrow_ + t * hidden_;
        norm_row(narrow, narrow, hidden_, b.streams->narrow_norm);
        const Vec half = Vec::set(0.70710678f);
        for (int64_t j = 0; j < hidden_; j += Vec::kWidth) {
            const int64_t n = least(hidden_ - j, Vec::kWidth);
            const Vec branch = Vec::load(normed + j, n) + Vec::load(narrow + j, n);
            ((Vec::load(x + j, n) + branch) * half).store(x + j, n);
        }
    }

    // Corrects a token's streams by what the block made of the active one, which x holds; x receives what
    // the branch of the block's own input reads. `spare` has C floats.
    void correct(const Block& b, int64_t t, float* x, float* spare) const {
        const Streams& s = *b.streams;
        float routed[kMost], factors[kMost];
        float *rows = row(t), *active = rows + s.active * hidden_;
        route(b, x, spare, routed);
        for (int64_t q = 0; q < count_; ++q)
            factors[q] = product_with_row(s.correct, q, routed) + 1.0f;
        for (int64_t j = 0; j < hidden_; j += Vec::kWidth) {
            const int64_t n = least(hidden_ - j, Vec::kWidth);
            const Vec change = Vec::load(x + j, n) - Vec::load(active + j, n);
            for (int64_t q = 0; q < count_; ++q) {
                float* at = rows + q * hidden_ + j;
                fma(Vec::set(factors[q]), change, Vec::load(at, n)).store(at, n);
            }
        }
        std::memcpy(x, active, static_cast<size_t>(hidden_) * sizeof(float));
        if (!s.scale.weight)
            return;
        read_row(s.scale.weight, s.scale.dtype, 0, spare, hidden_);
        for (int64_t j = 0; j < hidden_; j += Vec::kWidth) {
            const int64_t n = least(hidden_ - j, Vec::kWidth);
            (Vec::load(x + j, n) * Vec::load(spare + j, n)).store(x + j, n);
        }
    }

    // Adds a branch to all streams of a token but the first.
    void add(int64_t t, const float* branch) const {
        for (int64_t q = 1; q < count_; ++q) {
            float* at = row(t) + q * hidden_;
            add_row(at, at, branch, hidden_, 1.0f, Scale{});
        }
    }

private:
    // The weights of the streams; `spare` has C floats.
    void route(const Block& b, const float* x, float* spare, float* routed) const {
        const Streams& s = *b.streams;
        norm_row(x, spare, hidden_, s.router_norm);
        multiply_row(spare, hidden_, 1.0f / static_cast<float>(hidden_));
        for (int64_t i = 0; i < count_; ++i)
            routed[i] = std::tanh(product_with_row(s.router, i, spare));
    }

    int64_t count_ = 1, hidden_ = 0;
    float *rows_ = nullptr, *narrow_ = nullptr, *low_ = nullptr;
    Bf16* rounded_low_ = nullptr;
};

// Zeros the numbers of a row that do not exceed its mean by so many standard deviations, and subtracts this
// bound from the others.
inline void thin_row(float* x, int64_t n, float deviations) {
    const float mean = sum_of(x, n) / static_cast<float>(n);
    const float deviation = std::sqrt(squares_of(x, mean, n) / static_cast<float>(n));
    const Vec bound = Vec::set(mean + deviation * deviations), zero = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        max(zero, Vec::load(x + j, count) - bound).store(x + j, count);
    }
}

// Feed-forwards with sparse gates: the bound is that of a whole row, so that both products are apart.
class SparseFeed {
public:
    void take(Scratch& scratch, const StackCall& call, bool rounds) {
        int64_t wide = 0, width = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            if (const Block& b = call.blocks[i]; b.sparse) {
                wide = most(wide, b.mlp_in.outputs);
                width = most(width, b.ffn);
            }
        both_ = scratch.part<float>(call.step.tokens * wide);
        inner_ = scratch.part<float>(call.step.tokens * width);
        rounded_ = scratch.part<Bf16>(rounds ? call.step.tokens * width : 0);
    }

    void run(const Block& b, const Rows& x, float* out, const ProductRoom& products, Team& team, int rank,
             const Following& middle, const Following& next) const {
        const int64_t width = b.ffn, wide = b.mlp_in.outputs;
        const bool rounds = rounds_rows(b.mlp_out, x.count);
        project(products, x, b.mlp_in, both_, team, rank, middle);
        each_one(team, x.count, [&](int64_t t) {
            float* gate = both_ + t * wide;
            thin_row(gate, width, b.cutoff);
            activate_row(b.activation, gate, b.gated ? gate + width : nullptr, width);
            copy_row(gate, inner_ + t * width, width);
            if (rounds)
                copy_row(gate, rounded_ + t * width, width);
        });
        project(products, {inner_, rounds ? rounded_ : nullptr, width, x.count}, b.mlp_out, out, team, rank,
                next);
    }

private:
    float *both_ = nullptr, *inner_ = nullptr;
    Bf16* rounded_ = nullptr;
};

} // namespace
} // namespace slipstream
