// A causal language model in one job: embedding, the stack of blocks, final norm, vocabulary projection, and
// the choice of the best token or of a sampled one.
#pragma once

#include <optional>

namespace slipstream {
namespace {

class Model {
public:
    Model(const ModelCall& call, char* base, int threads)
        : call_(call), frame_(*call.frame), hidden_(call.stack.blocks[0].hidden), narrowed_(call),
          layers_(call.stack), stack_(layers_, narrowed_.front(), base, threads), token_ids_(call.token_ids),
          positions_(call.positions), suppressed_{call.suppressed, call.best ? call.num_suppressed : 0} {
        const int64_t tokens = call.stack.step.tokens, rows = call.rows;
        Scratch scratch(base ? base + stack_.bytes() : nullptr);
        if (call.steps > 1)
            follow(scratch, tokens);
        const bool in = frame_.project_in.outputs > 0, out = frame_.project_out.outputs > 0;
        embedded_.take(scratch, frame_.project_in, in ? tokens : 0, threads);
        entering_ = scratch.part<float>(in ? tokens * hidden_ : 0);
        inputs_.take(scratch, frame_, call.stack.num_blocks, tokens, threads);
        split_.take(scratch, frame_, tokens, rows, threads);
        width_ = hidden_ * split_.count();
        layers_.places = positions_;
        layers_.inputs = inputs_.inputs();
        layers_.inputs_stride = inputs_.stride();
        normed_.take(scratch, out ? frame_.project_out : frame_.head, rows, threads);
        projected_.take(scratch, frame_.head, out ? rows : 0, threads);
        best_ = scratch.part<Best>(rows * threads);
        if (call.screen)
            screening_.emplace(*call.screen, frame_.head, frame_.logit_scale, suppressed_, scratch, threads);
        if (call.draw)
            draws_.emplace(*call.draw, rows, frame_.head.outputs, scratch, threads);
        logits_ = call.draw ? draws_->scores(0) : call.logits;
        own_floats_ = call.logits || call.draw ? 0 : rows * kMostColumns;
        own_ = scratch.part<float>(own_floats_ * threads);
        if (narrowed_.any())
            narrow(scratch, base, threads);
        bytes_ = stack_.bytes() + scratch.used() + (rest_ ? rest_->bytes() : 0);
    }

    int64_t bytes() const { return bytes_; }

    void run(Team& team, int rank) {
        if (call_.steps > 1) {
            if (rank == 0)
                begin();
            team.meet();
        }
        for (int64_t step = 0; step < call_.steps; ++step) {
            if (frame_.project_in.outputs)
                project_in(team, rank);
            if (inputs_.any())
                inputs_.run(frame_, [&](int64_t t) { return token(t); }, team, rank);
            if (split_.any())
                split_.split(frame_, inputs_.row(0), team, rank);
            if (!stack_.run(
                    team, rank, [&](int64_t t, float* row) { enter(t, row); }, [](int64_t, const float*) {},
                    [&] { tell(step - 1); }))
                return;
            if (rest_ && !go_on(team, rank))
                return;
            leave(team, rank, step);
            if (call_.steps == 1)
                return;
            if (rank == 0)
                *ended_ = advance(step);
            team.meet();
            if (*ended_)
                return;
        }
    }

private:
    // The rows that a matrix multiplies, in the representations that it requires.
    struct Input {
        float* full = nullptr;
        Bf16* rounded = nullptr;
        char* operands = nullptr;
        int64_t width = 0, count = 0, operand_size = 0;

        void take(Scratch& scratch, const Matrix& m, int64_t rows, int threads) {
            width = m.inputs, count = rows;
            full = scratch.part<float>(rows * width);
            if (rounds(m, rows))
                rounded = scratch.part<Bf16>(rows * width);
            operand_size = operand_bytes(width, rows);
            operands = scratch.part<char>(operand_size * threads);
        }
        float* row(int64_t r) const { return full + r * width; }
        void filled(int64_t r) const {
            if (rounded)
                copy_row(row(r), rounded + r * width, width);
        }
        // The operand of one thread, once the rows are complete.
        Operand operand(const Matrix& m, int rank) const {
            return prepare({full, rounded, width, count}, m, operands + operand_size * rank);
        }
    };

    // What changes from step to step when a call runs several steps.
    struct Moving {
        int64_t *token_ids, *positions, *slots;
        int32_t* kv_lens;
    };

    void follow(Scratch& scratch, int64_t tokens) {
        moving_ = {scratch.part<int64_t>(tokens), scratch.part<int64_t>(tokens),
                   scratch.part<int64_t>(tokens), scratch.part<int32_t>(tokens)};
        ended_ = scratch.part<int64_t>(1);
        token_ids_ = moving_.token_ids;
        positions_ = moving_.positions;
        layers_.positions = layers_.positions ? moving_.positions : nullptr;
        layers_.step.slots = moving_.slots;
        layers_.step.kv_lens = moving_.kv_lens;
    }

    void narrow(Scratch& scratch, char* base, int threads) {
        last_ = narrowed_.of_rows(call_.stack);
        if (inputs_.any()) {
            inputs_of_rows_ = scratch.part<float>(call_.rows * inputs_.stride());
            last_.inputs = inputs_of_rows_;
            last_.inputs_stride = inputs_.stride();
        }
        rest_.emplace(last_, narrowed_.back(), base ? base + stack_.bytes() + scratch.used() : nullptr,
                      threads);
    }

    // Runs the last layers on the rows alone; returns false as `Stack::run`.
    bool go_on(Team& team, int rank) {
        if (inputs_.any())
            each_one(team, call_.rows, [&](int64_t r) {
                std::memcpy(inputs_of_rows_ + r * inputs_.stride(),
                            inputs_.inputs() + call_.logit_rows[r] * inputs_.stride(),
                            static_cast<size_t>(inputs_.stride()) * sizeof(float));
            });
        return rest_->run(
            team, rank,
            [&](int64_t r, float* row) {
                std::memcpy(row, left_by_all(r), static_cast<size_t>(width_) * sizeof(float));
            },
            [](int64_t, const float*) {}, [] {});
    }

    // What the layers of all tokens make of a row's token.
    const float* left_by_all(int64_t r) const { return stack_.left() + call_.logit_rows[r] * width_; }
    // What all layers make of it.
    const float* left(int64_t r) const { return rest_ ? rest_->left() + r * width_ : left_by_all(r); }

    void begin() const {
        for (int64_t t = 0; t < call_.rows; ++t) {
            moving_.token_ids[t] = call_.token_ids[t];
            moving_.positions[t] = call_.positions[t];
            moving_.slots[t] = call_.stack.step.slots[t];
            moving_.kv_lens[t] = call_.stack.step.kv_lens[t];
        }
    }

    void tell(int64_t step) {
        if (call_.told && step >= 0)
            stops_ = call_.told(step) != 0;
    }

    // Make each sequence's token the input of the next step. Return whether the call ends: a token is one of
    // the ends, is -1 or has no embedding, the last step is done, or the callback has requested it.
    bool advance(int64_t step) const {
        const Step& s = call_.stack.step;
        bool ended = stops_ || step + 1 == call_.steps;
        for (int64_t t = 0; t < call_.rows; ++t) {
            const int64_t token = call_.best[t * call_.steps + step], at = moving_.kv_lens[t];
            ended =
                ended || token < 0 || token >= (frame_.embed_end ? frame_.embed_end : frame_.embed.outputs);
            for (int64_t i = 0; i < call_.num_ends; ++i)
                ended = ended || call_.ends[i] == token;
            moving_.token_ids[t] = token;
            moving_.positions[t] += 1;
            moving_.kv_lens[t] += 1;
            if (at < s.table_width * s.block_size)
                moving_.slots[t] =
                    s.block_table[t * s.table_width + at / s.block_size] * s.block_size + at % s.block_size;
        }
        *call_.done = step + 1;
        return ended;
    }

    // The id by which a token is embedded.
    int64_t token(int64_t t) const {
        const int64_t id = token_ids_[t];
        for (int64_t i = 0; i < frame_.num_placeholders; ++i)
            if (frame_.placeholders[i] == id)
                return frame_.stand_in;
        return id;
    }

    void embed(int64_t t, float* row) const { look_up(frame_.embed, token(t), frame_.embed_scale, row); }

    void project_in(Team& team, int rank) {
        each_one(team, call_.stack.step.tokens, [&](int64_t t) {
            embed(t, embedded_.row(t));
            embedded_.filled(t);
        });
        const Operand x = embedded_.operand(frame_.project_in, rank);
        each_in_runs(team, rank, hidden_, grain(frame_.project_in, hidden_, team.size()),
                     [&](int64_t begin, int64_t end) {
                         multiply(x, frame_.project_in, begin, end, entering_ + begin, hidden_);
                     });
    }

    void enter(int64_t t, float* row) const {
        if (split_.any())
            return split_.enter(t, inputs_.row(t), row);
        const float* ready = frame_.project_in.outputs ? entering_ + t * hidden_
                             : inputs_.any()           ? inputs_.row(t)
                                                       : nullptr;
        if (ready)
            std::memcpy(row, ready, static_cast<size_t>(hidden_) * sizeof(float));
        else
            embed(t, row);
        if (!frame_.pos_after_norm)
            put_at_place(t, row);
        norm_row(row, row, hidden_, frame_.embed_norm);
        if (frame_.pos_after_norm)
            put_at_place(t, row);
    }

    void put_at_place(int64_t t, float* row) const {
        if (frame_.type_row)
            shift_row(row, frame_.type_row, frame_.type_dtype, 0, hidden_);
        if (!frame_.pos_embed)
            return;
        const bool is_padding = frame_.pos_padding >= 0 && token_ids_[t] == frame_.pos_padding;
        const int64_t at = is_padding ? frame_.pos_padding : positions_[t] + frame_.pos_offset;
        shift_row(row, frame_.pos_embed, frame_.pos_dtype, at * hidden_, hidden_);
    }

    void leave(Team& team, int rank, int64_t step) {
        if (split_.any())
            split_.join(frame_, [&](int64_t r) { return left(r); }, team, rank);
        each_one(team, call_.rows, [&](int64_t r) {
            if (split_.any())
                split_.leave(r, left(r), normed_.row(r));
            norm_row(split_.any() ? normed_.row(r) : left(r), normed_.row(r), hidden_, frame_.final_norm);
            normed_.filled(r);
        });
        const bool out = frame_.project_out.outputs > 0;
        if (out) {
            const int64_t width = frame_.project_out.outputs;
            const Operand x = normed_.operand(frame_.project_out, rank);
            each_in_runs(team, rank, width, grain(frame_.project_out, width, team.size()),
                         [&](int64_t begin, int64_t end) {
                             multiply(x, frame_.project_out, begin, end, projected_.full + begin, width);
                         });
            each_one(team, call_.rows, [&](int64_t r) {
                if (frame_.out_activation >= 0)
                    activate_row(frame_.out_activation, projected_.row(r), nullptr, width);
                norm_row(projected_.row(r), projected_.row(r), width, frame_.out_norm);
                projected_.filled(r);
            });
        }
        head(out ? projected_ : normed_, team, rank, step);
    }

    void head(const Input& input, Team& team, int rank, int64_t step) {
        const Matrix& m = frame_.head;
        const Operand x = input.operand(m, rank);
        if (call_.entered)
            write_down(input, team, rank, step);
        if (screening_)
            return screened(x, team, rank, step);
        const bool looks = call_.best && !draws_;
        Best* best = best_ + rank * call_.rows;
        each_own(team, rank, [&](int one) {
            for (int64_t r = 0; r < call_.rows; ++r)
                best_[one * call_.rows + r] = {0.0f, -1};
        });
        each_in_runs(team, rank, m.outputs, grain(m, m.outputs, team.size()),
                     [&](int64_t begin, int64_t end) {
                         float* to = logits_ ? logits_ + begin : own_ + own_floats_ * rank;
                         const int64_t n = end - begin, stride = logits_ ? m.outputs : n;
                         multiply(x, m, begin, end, to, stride);
                         for (int64_t r = 0; r < call_.rows; ++r) {
                             finish(to + r * stride, n);
                             suppressed_.hide(to + r * stride, begin, end);
                             if (looks)
                                 look_through(to + r * stride, n, begin, best[r]);
                         }
                     });
        if (draws_)
            draws_->run(team, rank, step, call_.best + step, call_.steps);
        else if (rank == 0 && looks)
            take_best(best, team.size(), step);
    }

    // Write the inputs of the projection to `entered`, including those of tokens whose logits are not
    // computed.
    void write_down(const Input& input, Team& team, int rank, int64_t step) {
        const int64_t count = call_.num_entered, width = frame_.head.inputs;
        if (count == 1) {
            if (rank == 0)
                std::memcpy(call_.entered + step * width, input.row(0),
                            static_cast<size_t>(width) * sizeof(float));
            return;
        }
        each_one(team, count, [&](int64_t i) {
            norm_row(stack_.left() + (call_.stack.step.tokens - count + i) * hidden_,
                     call_.entered + i * width, hidden_, frame_.final_norm);
        });
    }

    // Find the best token of a single row; logits are computed only for tokens that the screen cannot rule
    // out.
    void screened(const Operand& x, Team& team, int rank, int64_t step) {
        const Matrix& m = frame_.head;
        each_own(team, rank, [&](int one) { best_[one] = {0.0f, -1}; });
        Best& best = best_[rank];
        screening_->run(x, team, rank, best, [&](int64_t begin, int64_t end) {
            float* to = own_ + own_floats_ * rank;
            multiply(x, m, begin, end, to, end - begin);
            finish(to, end - begin);
            suppressed_.hide(to, begin, end);
            look_through(to, end - begin, begin, best);
        });
        if (rank == 0) {
            take_best(best_, team.size(), step);
            call_.looked[step] = screening_->looked(team.size());
        }
    }

    // Reduce the best tokens that the threads have found, for each row.
    void take_best(Best* best, int threads, int64_t step) const {
        for (int64_t r = 0; r < call_.rows; ++r) {
            for (int other = 1; other < threads; ++other)
                if (is_better(best_[other * call_.rows + r], best[r]))
                    best[r] = best_[other * call_.rows + r];
            call_.best[r * call_.steps + step] = best[r].index;
        }
    }

    void finish(float* logits, int64_t n) const {
        if (frame_.logit_scale == 1.0f && frame_.softcap == 0.0f)
            return;
        const Vec scale = Vec::set(frame_.logit_scale), cap = Vec::set(frame_.softcap);
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            Vec x = Vec::load(logits + j, count) * scale;
            if (frame_.softcap != 0.0f)
                x = cap * tangent(x / cap);
            x.store(logits + j, count);
        }
    }

    const ModelCall& call_;
    const Frame& frame_;
    const int64_t hidden_;
    const Narrowed narrowed_;
    StackCall layers_; // the caller's, with the arrays of `moving_` if there are several steps
    Stack stack_;
    StackCall last_ = {};       // the layers of the rows alone, if there are some
    std::optional<Stack> rest_; // runs them
    float* inputs_of_rows_ = nullptr;
    const int64_t *token_ids_, *positions_;
    const Suppressed suppressed_; // empty if no best tokens are wanted
    Moving moving_ = {};
    int64_t* ended_ = nullptr;
    bool stops_ = false; // the callback has requested the end; set by the first thread only
    Input embedded_, normed_, projected_;
    InputsOfBlocks inputs_;
    SplitStreams split_;
    int64_t width_; // of a token's state: of all its streams
    float *entering_, *own_;
    float* logits_ = nullptr; // of all rows, if complete logits are needed
    std::optional<Draws> draws_;
    std::optional<Screening> screening_;
    Best* best_;
    int64_t own_floats_, bytes_;
};

} // namespace
} // namespace slipstream
