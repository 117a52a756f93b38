// A mixture of experts: which experts see a token, and the sum of what they say. The tokens of one expert lie
// together, so that its matrices are read once; the sum over a token's experts goes from its best to its
// last, whichever thread makes it.
//
// Source: Shazeer et al. 2017 (arXiv 1701.06538), eq. 1.
#pragma once

namespace slipstream {
namespace {

// x becomes softmax(x), over n values.
inline void softmax_row(float* x, int64_t n) {
    float top = x[0];
    for (int64_t j = 1; j < n; ++j)
        top = x[j] > top ? x[j] : top;
    Vec total = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        exponential(Vec::load(x + j, count) - Vec::set(top)).store(x + j, count);
        total = total + Vec::load(x + j, count);
    }
    const float factor = 1.0f / total.sum();
    for (int64_t j = 0; j < n; ++j)
        x[j] *= factor;
}

// The best of n values that is not taken yet, the first among equals.
inline int64_t best_of(const float* x, int64_t n, const int32_t* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t j = 0; j < n; ++j) {
        bool open = true;
        for (int64_t i = 0; open && i < count; ++i)
            open = taken[i] != j;
        if (open && (best < 0 || x[j] > x[best]))
            best = j;
    }
    return best;
}

// Two experts, each weighted by a softmax over the logits that lie close to the best remaining one; `close`
// has room for n values. Source: Liu et al. 2023 (arXiv 2310.00811), at inference.
inline void sparsemixer(const float* logits, int64_t n, float jitter, float* close, float* weights,
                        int32_t* chosen) {
    for (int64_t i = 0; i < 2; ++i) {
        const int64_t expert = best_of(logits, n, chosen, i);
        const float best = logits[expert];
        for (int64_t j = 0; j < n; ++j) {
            const float size = std::fabs(logits[j]),
                        distance = (best - logits[j]) / (size > best ? size : best);
            close[j] = distance > 2.0f * jitter || (i == 1 && j == chosen[0]) ? kNothing : logits[j];
        }
        softmax_row(close, n);
        weights[i] = close[expert];
        chosen[i] = static_cast<int32_t>(expert);
    }
}

// The experts of a token, best first, and their weights; the logits are overwritten.
inline void route(const Moe& moe, float* logits, float* spare, float* weights, int32_t* chosen) {
    if (moe.scoring == kSparsemixer) {
        sparsemixer(logits, moe.experts, moe.jitter, spare, weights, chosen);
        return;
    }
    if (moe.scoring == kSoftmaxTopk)
        softmax_row(logits, moe.experts);
    float sum = 0.0f;
    for (int64_t i = 0; i < moe.top_k; ++i) {
        chosen[i] = static_cast<int32_t>(best_of(logits, moe.experts, chosen, i));
        weights[i] = logits[chosen[i]];
        sum += weights[i];
    }
    if (moe.scoring == kTopkSoftmax)
        softmax_row(weights, moe.top_k);
    else if (moe.normalize)
        for (int64_t i = 0; i < moe.top_k; ++i)
            weights[i] /= sum;
}

class Experts {
public:
    void take(Scratch& scratch, const StackCall& call, int threads) {
        tokens_ = call.step.tokens;
        int64_t hidden = 0, ffn = 0, experts = 0, top = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i) {
            const Block& b = call.blocks[i];
            if (!b.moe)
                continue;
            hidden = most(hidden, b.hidden);
            ffn = most(ffn, b.ffn);
            experts = most(experts, b.moe->experts);
            top = most(top, b.moe->top_k);
        }
        const int64_t places = tokens_ * top, rounded = Vec::kBf16Dot ? places : 0;
        logits_ = scratch.part<float>(tokens_ * experts);
        spare_ = scratch.part<float>(tokens_ * experts);
        weights_ = scratch.part<float>(places);
        gates_ = scratch.part<float>(places ? tokens_ : 0);
        chosen_ = scratch.part<int32_t>(places);
        place_ = scratch.part<int64_t>(places);
        starts_ = scratch.part<int64_t>(experts ? experts + 1 : 0);
        active_ = scratch.part<int64_t>(experts ? experts + 1 : 0);
        rows_ = scratch.part<float>(places * hidden);
        inner_ = scratch.part<float>(places * ffn);
        said_ = scratch.part<float>(places * hidden);
        rounded_rows_ = scratch.part<Bf16>(rounded * hidden);
        rounded_inner_ = scratch.part<Bf16>(rounded * ffn);
        operand_size_ = places ? operand_bytes(most(hidden, ffn), least(tokens_, kFewRows)) : 0;
        operands_ = scratch.part<char>(operand_size_ * threads);
        own_floats_ = places ? tokens_ * 128 : 0;
        own_ = scratch.part<float>(own_floats_ * threads);
    }

    // out += or, where `adds` is not set, = what the experts say of rows x, `(T, C)`. With a gate for the
    // shared experts, what they said (in out) is multiplied by it first.
    void run(const Block& b, const float* x, float* out, bool adds, Team& team, int rank) const {
        const Moe& moe = *b.moe;
        decide(moe, x, team);
        if (rank == 0)
            sort(moe);
        team.meet();
        share(team, tokens_, [&](int64_t t) {
            for (int64_t i = 0; i < moe.top_k; ++i) {
                const int64_t place = place_[t * moe.top_k + i] * b.hidden;
                std::memcpy(rows_ + place, x + t * b.hidden, static_cast<size_t>(b.hidden) * sizeof(float));
                if (Vec::kBf16Dot)
                    copy_row(x + t * b.hidden, rounded_rows_ + place, b.hidden);
            }
        });
        first(b, team, rank);
        second(b, team, rank);
        share(team, tokens_, [&](int64_t t) { sum(b, t, out + t * b.hidden, adds); });
    }

private:
    template <class F>
    static void share(Team& team, int64_t count, F f) {
        each(team, count, ceil_div(count, 2 * static_cast<int64_t>(team.size())),
             [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                     f(i);
             });
    }

    void decide(const Moe& moe, const float* x, Team& team) const {
        const int64_t hidden = moe.router.inputs;
        const Operand rows = {{x, nullptr, hidden, tokens_}};
        each(team, moe.experts, 16, [&](int64_t begin, int64_t end) {
            multiply(rows, moe.router, begin, end, logits_ + begin, moe.experts);
        });
        share(team, tokens_, [&](int64_t t) {
            route(moe, logits_ + t * moe.experts, spare_ + t * moe.experts, weights_ + t * moe.top_k,
                  chosen_ + t * moe.top_k);
            if (moe.shared_gate.outputs) {
                const Operand row = {{x + t * hidden, nullptr, hidden, 1}};
                multiply(row, moe.shared_gate, 0, 1, gates_ + t, 1);
            }
        });
    }

    // Which rows are whose: starts_[e] is where those of expert e begin.
    void sort(const Moe& moe) const {
        for (int64_t e = 0; e <= moe.experts; ++e)
            starts_[e] = 0;
        for (int64_t i = 0; i < tokens_ * moe.top_k; ++i)
            ++starts_[chosen_[i] + 1];
        for (int64_t e = 0; e < moe.experts; ++e)
            starts_[e + 1] += starts_[e];
        // Counting up moves each start to the next one's place.
        for (int64_t i = 0; i < tokens_ * moe.top_k; ++i)
            place_[i] = starts_[chosen_[i]]++;
        for (int64_t e = moe.experts; e > 0; --e)
            starts_[e] = starts_[e - 1];
        starts_[0] = 0;
        int64_t count = 0;
        for (int64_t e = 0; e < moe.experts; ++e)
            if (starts_[e + 1] > starts_[e])
                active_[count++] = e;
        active_[moe.experts] = count;
    }

    // Calls `work(expert, x, begin, end)` for pieces of the outputs of every expert that has rows; a thread's
    // pieces follow each other, for memory is read faster so.
    template <class F>
    void over_experts(const Moe& moe, const Matrix* matrices, int64_t outputs, const float* full,
                      const Bf16* rounded, Team& team, int rank, F work) const {
        const int64_t piece = grain(matrices[0], outputs, team.size()), pieces = ceil_div(outputs, piece);
        const int64_t width = matrices[0].inputs;
        int64_t ready = -1;
        Operand x = {};
        each_in_runs(team, rank, active_[moe.experts] * pieces, 1, [&](int64_t task, int64_t) {
            const int64_t e = active_[task / pieces], begin = task % pieces * piece;
            const int64_t start = starts_[e], count = starts_[e + 1] - start;
            const Matrix& m = matrices[e];
            if (ready != e) {
                const Bf16* own = rounds(m, count) ? rounded + start * width : nullptr;
                x = prepare({full + start * width, own, width, count}, m, operands_ + operand_size_ * rank);
                ready = e;
            }
            work(e, x, begin, least(begin + piece, outputs));
        });
    }

    void first(const Block& b, Team& team, int rank) const {
        float* own = own_ + own_floats_ * rank;
        over_experts(*b.moe, b.moe->experts_in, b.ffn, rows_, rounded_rows_, team, rank,
                     [&](int64_t e, const Operand& x, int64_t begin, int64_t end) {
                         const Matrix& m = b.moe->experts_in[e];
                         const int64_t n = end - begin;
                         float* out = inner_ + starts_[e] * b.ffn + begin;
                         multiply(x, m, begin, end, out, b.ffn);
                         if (b.gated)
                             multiply(x, m, b.ffn + begin, b.ffn + end, own, n);
                         for (int64_t r = 0; r < x.rows.count; ++r) {
                             activate_row(b.activation, out + r * b.ffn, b.gated ? own + r * n : nullptr, n);
                             if (Vec::kBf16Dot)
                                 copy_row(out + r * b.ffn, rounded_inner_ + (starts_[e] + r) * b.ffn + begin,
                                          n);
                         }
                     });
    }

    void second(const Block& b, Team& team, int rank) const {
        over_experts(*b.moe, b.moe->experts_out, b.hidden, inner_, rounded_inner_, team, rank,
                     [&](int64_t e, const Operand& x, int64_t begin, int64_t end) {
                         multiply(x, b.moe->experts_out[e], begin, end, said_ + starts_[e] * b.hidden + begin,
                                  b.hidden);
                     });
    }

    void sum(const Block& b, int64_t t, float* out, bool adds) const {
        const Moe& moe = *b.moe;
        Vec gate = Vec::set(adds ? 1.0f : 0.0f);
        if (adds && moe.shared_gate.outputs)
            gate = sigmoid(Vec::set(gates_[t]));
        for (int64_t j = 0; j < b.hidden; j += Vec::kWidth) {
            const int64_t n = least(b.hidden - j, Vec::kWidth);
            Vec total = adds ? Vec::load(out + j, n) * gate : Vec::set(0);
            for (int64_t i = t * moe.top_k; i < (t + 1) * moe.top_k; ++i)
                total = fma(Vec::load(said_ + place_[i] * b.hidden + j, n), Vec::set(weights_[i]), total);
            total.store(out + j, n);
        }
    }

    int64_t tokens_ = 0, operand_size_ = 0, own_floats_ = 0;
    float *logits_, *spare_, *weights_, *gates_, *rows_, *inner_, *said_, *own_;
    int32_t* chosen_;
    int64_t *place_, *starts_; // by (token, choice), by expert
    int64_t* active_;          // the experts that have rows, and in the last place how many these are
    Bf16 *rounded_rows_, *rounded_inner_;
    char* operands_;
};

} // namespace
} // namespace slipstream
