// Routing of tokens to experts: which experts a token gets, with which weights, and where its rows lie when
// rows are sorted by expert.
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

// The index of the largest of n values that is not taken yet, the first among equals.
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

// Selects two experts, each weighted by a softmax over the logits that are close to the best remaining one;
// `close` has room for n values. Source: Liu et al. 2023 (arXiv 2310.00811), at inference.
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

inline void sigmoid_row(float* x, int64_t n) {
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const int64_t count = least(n - j, Vec::kWidth);
        sigmoid(Vec::load(x + j, count)).store(x + j, count);
    }
}

// Whether the last of k scores, of which no other is better, has an equal beside the k.
inline bool is_tied(const float* scores, int64_t n, float last, int64_t k) {
    int64_t as_good = 0;
    for (int64_t j = 0; j < n; ++j)
        as_good += scores[j] >= last;
    return as_good > k;
}

// The score of an expert or a group that is not to be chosen. A bias may give it to some of those that are.
constexpr float kOut = -std::numeric_limits<float>::infinity();

// Sets the scores of all experts outside of the best groups to kOut; `of_group` has room for a score of
// each group. Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2, at inference.
inline void keep_best_groups(const Moe& moe, float* scores, float* of_group) {
    const int64_t size = moe.experts / moe.groups;
    for (int64_t g = 0; g < moe.groups; ++g) {
        float first = kOut, second = kOut;
        for (int64_t j = g * size; j < (g + 1) * size; ++j) {
            if (scores[j] > first) {
                second = first;
                first = scores[j];
            } else if (scores[j] > second) {
                second = scores[j];
            }
        }
        of_group[g] = moe.sums_two ? first + second : first;
    }
    float last = of_group[0]; // the score of the worst group that is kept
    for (int64_t g = 0; g < moe.groups; ++g) {
        int64_t better = 0;
        for (int64_t i = 0; i < moe.groups; ++i)
            better += of_group[i] > of_group[g] || (of_group[i] == of_group[g] && i < g);
        last = better == moe.top_groups - 1 ? of_group[g] : last;
    }
    if (is_tied(of_group, moe.groups, last, moe.top_groups))
        keep_top(of_group, moe.groups, moe.top_groups, kOut);
    for (int64_t g = 0; g < moe.groups; ++g) {
        int64_t better = 0;
        for (int64_t i = 0; i < moe.groups; ++i)
            better += of_group[i] > of_group[g] || (of_group[i] == of_group[g] && i < g);
        for (int64_t j = g * size; better >= moe.top_groups && j < (g + 1) * size; ++j)
            scores[j] = kOut;
    }
}

// The experts of a token, best first, and their weights; the logits are overwritten. `spare` has room for
// twice the number of experts.
inline void route(const Moe& moe, float* logits, float* spare, float* weights, int32_t* chosen) {
    const int64_t n = moe.experts;
    if (moe.scoring == kSparsemixer) {
        sparsemixer(logits, n, moe.jitter, spare, weights, chosen);
        return;
    }
    if (moe.scoring == kSoftmaxTopk)
        softmax_row(logits, n);
    if (moe.scoring == kSigmoidTopk)
        sigmoid_row(logits, n);
    const bool grouped = moe.top_groups < moe.groups;
    float* ranking = logits;
    if (moe.choice || grouped) {
        ranking = spare;
        std::memcpy(ranking, logits, static_cast<size_t>(n) * sizeof(float));
        if (moe.choice)
            shift_row(ranking, moe.choice, moe.choice_dtype, 0, n);
        if (grouped)
            keep_best_groups(moe, ranking, spare + n);
    }
    const auto choose = [&] {
        for (int64_t i = 0; i < moe.top_k; ++i)
            chosen[i] = static_cast<int32_t>(best_of(ranking, n, chosen, i));
    };
    choose();
    if (is_tied(ranking, n, ranking[chosen[moe.top_k - 1]], moe.top_k)) {
        keep_top(ranking, n, moe.top_k, kOut);
        choose();
    }
    for (int64_t i = 0; i < moe.top_k; ++i)
        weights[i] = logits[chosen[i]];
    if (moe.scoring == kTopkSoftmax) {
        softmax_row(weights, moe.top_k);
        return;
    }
    if (moe.scoring == kTopkSigmoid)
        sigmoid_row(weights, moe.top_k);
    float sum = moe.more_sum;
    for (int64_t i = 0; i < moe.top_k; ++i)
        sum += weights[i];
    const float factor =
        moe.normalize ? moe.factor / (sum < moe.least_sum ? moe.least_sum : sum) : moe.factor;
    for (int64_t i = 0; i < moe.top_k; ++i)
        weights[i] *= factor;
}

// The maximum, over the blocks of a call, of each quantity that determines the experts' scratch.
struct MostOfExperts {
    explicit MostOfExperts(const StackCall& call) {
        for (int64_t i = 0; i < call.num_blocks; ++i)
            if (call.blocks[i].moe)
                include(call.blocks[i]);
    }
    explicit MostOfExperts(const Block& b) { include(b); }

    void include(const Block& b) {
        hidden = most(hidden, b.hidden);
        ffn = most(ffn, b.ffn);
        experts = most(experts, b.moe->experts);
        top_k = most(top_k, b.moe->top_k);
        rounded = rounded || packs_whole(b.moe->experts_out[0]);
    }

    int64_t hidden = 0, ffn = 0, experts = 0, top_k = 0;
    bool rounded = false; // in some block, complete rows are packed for the second matrix
};

// The routing of one layer. Choice i is choice i % top_k, best first, of token i / top_k; its place is its
// index when all choices are sorted by expert.
class Routing {
public:
    void take(Scratch& scratch, const MostOfExperts& most_of, int64_t tokens) {
        tokens_ = tokens;
        logits_ = scratch.part<float>(tokens * most_of.experts);
        spare_ = scratch.part<float>(2 * tokens * most_of.experts);
        weights_ = scratch.part<float>(tokens * most_of.top_k);
        gates_ = scratch.part<float>(most_of.top_k ? tokens : 0);
        chosen_ = scratch.part<int32_t>(tokens * most_of.top_k);
        place_ = scratch.part<int64_t>(tokens * most_of.top_k);
        choice_ = scratch.part<int64_t>(tokens * most_of.top_k);
        starts_ = scratch.part<int64_t>(most_of.experts ? most_of.experts + 1 : 0);
        active_ = scratch.part<int64_t>(most_of.experts);
        count_ = scratch.part<int64_t>(most_of.experts ? 1 : 0);
    }

    // Routes the rows of x, `(T, C)`.
    void decide(const Moe& moe, const float* x, Team& team, int rank) const {
        const int64_t hidden = moe.router.inputs;
        const auto score = [&](int64_t t, int64_t rows, int64_t begin, int64_t end) {
            multiply({{x + t * hidden, nullptr, hidden, rows}}, moe.router, begin, end,
                     logits_ + t * moe.experts + begin, moe.experts);
        };
        constexpr int64_t kExperts = 16, kRows = 32;
        if (tokens_ <= kRows)
            each(team, moe.experts, kExperts,
                 [&](int64_t begin, int64_t end) { score(0, tokens_, begin, end); });
        else
            each(team, tokens_, kRows,
                 [&](int64_t begin, int64_t end) { score(begin, end - begin, 0, moe.experts); });
        each_one(team, tokens_, [&](int64_t t) {
            route(moe, logits_ + t * moe.experts, spare_ + 2 * t * moe.experts, weights_ + t * moe.top_k,
                  chosen_ + t * moe.top_k);
            for (int64_t i = t * moe.top_k; moe.expert_scale && i < (t + 1) * moe.top_k; ++i)
                weights_[i] *= number_at(moe.expert_scale, moe.expert_scale_dtype, chosen_[i]);
            if (moe.shared_gate.outputs) {
                const Operand row = {{x + t * hidden, nullptr, hidden, 1}};
                multiply(row, moe.shared_gate, 0, 1, gates_ + t, 1);
            }
        });
        if (rank == 0)
            sort(moe);
        team.meet();
    }

    // Takes a choice that was made elsewhere, `(T, top_k)` weights and experts.
    void adopt(const Moe& moe, const float* weights, const int64_t* chosen, Team& team, int rank) const {
        if (rank == 0) {
            for (int64_t i = 0; i < tokens_ * moe.top_k; ++i) {
                weights_[i] = weights[i];
                chosen_[i] = static_cast<int32_t>(chosen[i]);
            }
            sort(moe);
        }
        team.meet();
    }

    // The experts that have rows are expert(0) to expert(active() - 1); the rows of expert e have places
    // [begin(e), end(e)).
    int64_t active() const { return *count_; }
    int64_t expert(int64_t i) const { return active_[i]; }
    int64_t begin(int64_t expert) const { return starts_[expert]; }
    int64_t end(int64_t expert) const { return starts_[expert + 1]; }

    int64_t place(int64_t choice) const { return place_[choice]; }
    int64_t choice(int64_t place) const { return choice_[place]; }

    // The factors of an expert's input and output for a choice; one of them is 1.
    float factor_of_input(const Moe& moe, int64_t choice) const {
        return moe.weighs_input ? weights_[choice] : 1.0f;
    }
    float factor_of_output(const Moe& moe, int64_t choice) const {
        return moe.weighs_input ? 1.0f : weights_[choice];
    }

    // The factor of the shared experts' output.
    Vec gate(const Moe& moe, int64_t token) const {
        return moe.shared_gate.outputs ? sigmoid(Vec::set(gates_[token])) : Vec::set(1);
    }

private:
    void sort(const Moe& moe) const {
        const int64_t choices = tokens_ * moe.top_k;
        for (int64_t e = 0; e <= moe.experts; ++e)
            starts_[e] = 0;
        for (int64_t i = 0; i < choices; ++i)
            ++starts_[chosen_[i] + 1];
        for (int64_t e = 0; e < moe.experts; ++e)
            starts_[e + 1] += starts_[e];
        // Counting up moves each start to the start of the next expert.
        for (int64_t i = 0; i < choices; ++i)
            place_[i] = starts_[chosen_[i]]++;
        for (int64_t e = moe.experts; e > 0; --e)
            starts_[e] = starts_[e - 1];
        starts_[0] = 0;
        for (int64_t i = 0; i < choices; ++i)
            choice_[place_[i]] = i;
        *count_ = 0;
        for (int64_t e = 0; e < moe.experts; ++e)
            if (starts_[e + 1] > starts_[e])
                active_[(*count_)++] = e;
    }

    int64_t tokens_ = 0;
    float *logits_, *spare_, *weights_, *gates_;
    int32_t* chosen_;
    int64_t *place_, *choice_, *starts_, *active_, *count_;
};

} // namespace
} // namespace slipstream
