// A mixture of experts: the weighted sum of the outputs of each token's experts. With few tokens all experts
// are computed together, so that no thread is idle; with many, one expert after another, each as a product of
// many rows.
//
// Source: Shazeer et al. 2017 (arXiv 1701.06538), eq. 1.
#pragma once

namespace slipstream {
namespace {

// Writes the row that an expert gets for a choice.
inline void copy_input(const Moe& moe, const Routing& routing, int64_t choice, const float* x, int64_t hidden,
                       float* to) {
    const float* row = x + choice / moe.top_k * hidden;
    if (!moe.weighs_input) {
        std::memcpy(to, row, static_cast<size_t>(hidden) * sizeof(float));
        return;
    }
    const Vec factor = Vec::set(routing.factor_of_input(moe, choice));
    for (int64_t j = 0; j < hidden; j += Vec::kWidth) {
        const int64_t n = least(hidden - j, Vec::kWidth);
        (Vec::load(row + j, n) * factor).store(to + j, n);
    }
}

// Computes all experts together. Every expert's output rows are kept until they are summed, in order of a
// token's choices, best first, independently of the thread.
class ExpertsTogether {
public:
    void take(Scratch& scratch, const MostOfExperts& room, int64_t tokens, int threads) {
        tokens_ = tokens;
        const int64_t places = tokens * room.top_k, rounded = Vec::kBf16Dot ? places : 0;
        rows_ = scratch.part<float>(places * room.hidden);
        inner_ = scratch.part<float>(places * room.ffn);
        said_ = scratch.part<float>(places * room.hidden);
        rounded_rows_ = scratch.part<Bf16>(rounded * room.hidden);
        rounded_inner_ = scratch.part<Bf16>(rounded * room.ffn);
        operand_size_ = operand_bytes(most(room.hidden, room.ffn), least(tokens, kFewRows));
        operands_ = scratch.part<char>(operand_size_ * threads);
        own_floats_ = tokens * kMostColumns;
        own_ = scratch.part<float>(own_floats_ * threads);
    }

    void run(const Block& b, const Routing& routing, const float* x, float* out, bool adds, Team& team,
             int rank) const {
        const Moe& moe = *b.moe;
        each_one(team, tokens_ * moe.top_k, [&](int64_t i) {
            const int64_t place = routing.place(i) * b.hidden;
            copy_input(moe, routing, i, x, b.hidden, rows_ + place);
            if (Vec::kBf16Dot)
                copy_row(rows_ + place, rounded_rows_ + place, b.hidden);
        });
        first(b, routing, team, rank);
        second(b, routing, team, rank);
        each_one(team, tokens_, [&](int64_t t) { sum(b, routing, t, out + t * b.hidden, adds); });
    }

private:
    // Call `work(expert, x, begin, end)` for ranges of the outputs of every expert that has rows. A thread's
    // ranges are consecutive, which makes reading from memory faster.
    template <class F>
    void over_experts(const Routing& routing, const Matrix* matrices, int64_t outputs, const float* full,
                      const Bf16* rounded, Team& team, int rank, F work) const {
        const int64_t piece = grain(matrices[0], outputs, team.size()), pieces = ceil_div(outputs, piece);
        const int64_t width = matrices[0].inputs;
        int64_t ready = -1;
        Operand x = {};
        each_in_runs(team, rank, routing.active() * pieces, 1, [&](int64_t task, int64_t) {
            const int64_t e = routing.expert(task / pieces), begin = task % pieces * piece;
            const int64_t start = routing.begin(e), count = routing.end(e) - start;
            const Matrix& m = matrices[e];
            if (ready != e) {
                const Bf16* own = rounds(m, count) ? rounded + start * width : nullptr;
                x = prepare({full + start * width, own, width, count}, m, operands_ + operand_size_ * rank);
                ready = e;
            }
            work(e, x, begin, least(begin + piece, outputs));
        });
    }

    void first(const Block& b, const Routing& routing, Team& team, int rank) const {
        float* own = own_ + own_floats_ * rank;
        over_experts(routing, b.moe->experts_in, b.ffn, rows_, rounded_rows_, team, rank,
                     [&](int64_t e, const Operand& x, int64_t begin, int64_t end) {
                         const Matrix& m = b.moe->experts_in[e];
                         const int64_t n = end - begin, at = routing.begin(e) * b.ffn + begin;
                         multiply(x, m, begin, end, inner_ + at, b.ffn);
                         if (b.gated)
                             multiply(x, m, b.ffn + begin, b.ffn + end, own, n);
                         for (int64_t r = 0; r < x.rows.count; ++r) {
                             float* row = inner_ + at + r * b.ffn;
                             activate_row(b.activation, row, b.gated ? own + r * n : nullptr, n);
                             if (Vec::kBf16Dot)
                                 copy_row(row, rounded_inner_ + at + r * b.ffn, n);
                         }
                     });
    }

    void second(const Block& b, const Routing& routing, Team& team, int rank) const {
        over_experts(routing, b.moe->experts_out, b.hidden, inner_, rounded_inner_, team, rank,
                     [&](int64_t e, const Operand& x, int64_t begin, int64_t end) {
                         multiply(x, b.moe->experts_out[e], begin, end,
                                  said_ + routing.begin(e) * b.hidden + begin, b.hidden);
                     });
    }

    void sum(const Block& b, const Routing& routing, int64_t t, float* out, bool adds) const {
        const Moe& moe = *b.moe;
        const Vec gate = adds ? routing.gate(moe, t) : Vec::set(0);
        for (int64_t j = 0; j < b.hidden; j += Vec::kWidth) {
            const int64_t n = least(b.hidden - j, Vec::kWidth);
            Vec total = adds ? Vec::load(out + j, n) * gate : Vec::set(0);
            for (int64_t i = t * moe.top_k; i < (t + 1) * moe.top_k; ++i)
                total = fma(Vec::load(said_ + routing.place(i) * b.hidden + j, n),
                            Vec::set(routing.factor_of_output(moe, i)), total);
            total.store(out + j, n);
        }
    }

    int64_t tokens_ = 0, operand_size_ = 0, own_floats_ = 0;
    float *rows_, *inner_, *said_, *own_;
    Bf16 *rounded_rows_, *rounded_inner_;
    char* operands_;
};

// Computes one expert after another and adds its output to its tokens immediately, so that only some rows of
// one expert are kept.
class ExpertsInTurn {
public:
    void take(Scratch& scratch, const MostOfExperts& room, int64_t tokens, int threads) {
        tokens_ = tokens;
        const int64_t rows = least(tokens, kFeedRows), few = least(tokens, kFewRows);
        rows_ = scratch.part<float>(rows * room.hidden);
        const int64_t widest = most(room.hidden, room.ffn);
        products_.take(scratch, {rows, room.rounded ? widest : room.hidden, few, widest, few * kMostColumns},
                       threads);
        packed_inner_ = scratch.part<char>(packed_bytes(rows, room.ffn));
        rounded_rows_ = scratch.part<Bf16>(Vec::kBf16Dot ? few * room.hidden : 0);
        few_.take(scratch, room.ffn, few);
    }

    void run(const Block& b, const Routing& routing, const float* x, float* out, bool adds, Team& team,
             int rank) const {
        each_one(team, tokens_, [&](int64_t t) {
            float* row = out + t * b.hidden;
            if (!adds)
                std::memset(row, 0, static_cast<size_t>(b.hidden) * sizeof(float));
            else if (b.moe->shared_gate.outputs)
                for (int64_t j = 0; j < b.hidden; j += Vec::kWidth) {
                    const int64_t n = least(b.hidden - j, Vec::kWidth);
                    (Vec::load(row + j, n) * routing.gate(*b.moe, t)).store(row + j, n);
                }
        });
        for (int64_t i = 0; i < routing.active(); ++i) {
            const int64_t e = routing.expert(i), end = routing.end(e);
            for (int64_t place = routing.begin(e); place < end; place += kFeedRows)
                hear(b, e, routing, place, least(kFeedRows, end - place), x, out, team, rank);
        }
    }

private:
    // Add the output of expert e for the rows at places [place, place + count).
    void hear(const Block& b, int64_t e, const Routing& routing, int64_t place, int64_t count, const float* x,
              float* out, Team& team, int rank) const {
        const Moe& moe = *b.moe;
        const FeedForward feed = {moe.experts_in[e], moe.experts_out[e], b.ffn,
                                  b.activation,      b.gated != 0,       false};
        const bool by_panels = feeds_many(feed, count);
        Bf16* rounded = !by_panels && rounds(feed.first, count) ? rounded_rows_ : nullptr;
        each_one(team, count, [&](int64_t r) {
            copy_input(moe, routing, routing.choice(place + r), x, b.hidden, rows_ + r * b.hidden);
            if (rounded)
                copy_row(rows_ + r * b.hidden, rounded + r * b.hidden, b.hidden);
        });
        // Add outputs [begin, begin + n) of row r; no other thread adds to them at this time.
        const auto add = [&](int64_t r, int64_t begin, const float* values, int64_t n) {
            const int64_t choice = routing.choice(place + r);
            const Vec weight = Vec::set(routing.factor_of_output(moe, choice));
            float* to = out + choice / moe.top_k * b.hidden + begin;
            for (int64_t j = 0; j < n; j += Vec::kWidth) {
                const int64_t some = least(n - j, Vec::kWidth);
                fma(Vec::load(values + j, some), weight, Vec::load(to + j, some)).store(to + j, some);
            }
        };
        if (by_panels) {
            feed_many(feed, rows_, count, products_.packed, packed_inner_, team, products_.own_of(rank),
                      [&](const Piece& piece) {
                          each_row(piece, [&](int64_t r, const float* values) {
                              add(r, piece.begin, values, piece.outputs);
                          });
                      });
            return;
        }
        float* said = products_.own_floats_of(rank);
        feed_few(feed, {rows_, rounded, b.hidden, count}, products_, few_, team, rank,
                 [&](const Operand& inner, int64_t begin, int64_t end) {
                     multiply(inner, feed.last, begin, end, said, end - begin);
                     for (int64_t r = 0; r < count; ++r)
                         add(r, begin, said + r * (end - begin), end - begin);
                 });
    }

    int64_t tokens_ = 0;
    float* rows_;
    Bf16* rounded_rows_;
    char* packed_inner_;
    ProductRoom products_;
    FewScratch few_;
};

// Number of tokens from which experts are computed one after another. Measured on a Zen 4 relative to all
// experts together, time of a prefill of 80, 300 and 512 tokens: 2 of 8 experts in bfloat16 1.00, 0.96 and
// 0.92, in int8 0.90, 0.85 and 0.81; 8 of 128 experts in bfloat16 1.04, 0.95 and 0.89.
constexpr int64_t kTokensInTurn = 65;

class Experts {
public:
    void take(Scratch& scratch, const MostOfExperts& room, int64_t tokens, int threads) {
        tokens_ = tokens;
        if (!room.experts)
            return;
        routing_.take(scratch, room, tokens_);
        if (tokens_ < kTokensInTurn)
            together_.take(scratch, room, tokens_, threads);
        else
            in_turn_.take(scratch, room, tokens_, threads);
    }

    // Compute the weighted output of the experts for rows x, `(T, C)`, as the router chooses for rows
    // `scored`, and add it to `out`, or, unless `adds`, store it there. If there is a gate for the shared
    // experts, their output (in `out`) is multiplied by it first.
    void run(const Block& b, const float* scored, const float* x, float* out, bool adds, Team& team,
             int rank) const {
        routing_.decide(*b.moe, scored, team, rank);
        run_chosen(b, x, out, adds, team, rank);
    }

    // The same with experts that were chosen elsewhere.
    void run(const Block& b, const float* weights, const int64_t* chosen, const float* x, float* out,
             Team& team, int rank) const {
        routing_.adopt(*b.moe, weights, chosen, team, rank);
        run_chosen(b, x, out, false, team, rank);
    }

private:
    void run_chosen(const Block& b, const float* x, float* out, bool adds, Team& team, int rank) const {
        if (tokens_ < kTokensInTurn)
            together_.run(b, routing_, x, out, adds, team, rank);
        else
            in_turn_.run(b, routing_, x, out, adds, team, rank);
    }

    int64_t tokens_ = 0;
    Routing routing_;
    ExpertsTogether together_;
    ExpertsInTurn in_turn_;
};

// The experts of a call by themselves.
class ExpertsAlone {
public:
    ExpertsAlone(const ExpertsCall& call, char* base, int threads) : call_(call) {
        block_.hidden = call.hidden;
        block_.ffn = call.ffn;
        block_.activation = call.activation;
        block_.gated = call.gated;
        block_.moe = &call.moe;
        Scratch scratch(base);
        x_ = scratch.part<float>(call.rows * call.hidden);
        out_ = scratch.part<float>(call.rows * call.hidden);
        experts_.take(scratch, MostOfExperts(block_), call.rows, threads);
        bytes_ = scratch.used();
    }

    int64_t bytes() const { return bytes_; }

    void run(Team& team, int rank) const {
        const int64_t hidden = call_.hidden;
        each_one(team, call_.rows,
                 [&](int64_t r) { read_row(call_.x, call_.dtype, r * hidden, x_ + r * hidden, hidden); });
        if (call_.weights)
            experts_.run(block_, call_.weights, call_.chosen, x_, out_, team, rank);
        else
            experts_.run(block_, x_, x_, out_, false, team, rank);
        each_one(team, call_.rows, [&](int64_t r) {
            write_row(out_ + r * hidden, call_.out, call_.dtype, r * hidden, hidden);
        });
    }

private:
    const ExpertsCall& call_;
    Block block_ = {};
    Experts experts_;
    float *x_, *out_;
    int64_t bytes_;
};

inline int64_t experts_bytes(const ExpertsCall& call, int threads) {
    return ExpertsAlone(call, nullptr, threads).bytes();
}

inline void experts(const ExpertsCall& call, char* base, Team& team, int rank) {
    ExpertsAlone(call, base, team.size()).run(team, rank);
}

} // namespace
} // namespace slipstream
