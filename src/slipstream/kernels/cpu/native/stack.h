// Runs all layers of one step in one job. The residual stream is float32 throughout; the threads of the team
// go through the phases of each layer together and distribute the tokens, outputs or heads of each phase.
#pragma once

namespace slipstream {
namespace {

class Stack {
public:
    Stack(const StackCall& call, char* base, int threads) : Stack(call, all_layers(call), base, threads) {}

    Stack(const StackCall& call, const Layers& layers, char* base, int threads)
        : call_(call), layers_(layers), next_(call_, layers_), tokens_(call.step.tokens) {
        int64_t hidden = 0, inner = 0, joined = 0, rounded = 0;
        for (int64_t i = layers.first; i < layers.end; ++i) {
            const Block& b = call.blocks[i];
            hidden = most(hidden, b.hidden);
            if (feeds(b)) {
                inner = most(inner, feed_of(b).width);
                rounded = most(rounded, b.sparse || packs_whole(feed_of(b).last) ? feed_of(b).width : 0);
            }
            joined = most(joined, joined_of(b));
            if (layers.replans(call, i))
                room_.include(spans(b), heads_of(call_, b), threads);
            if (b.across)
                across_room_.include(spans_across(call_.step, *b.across), heads_of(call_, b), threads);
        }
        Scratch scratch(base);
        room_.reserve(scratch, threads);
        across_room_.reserve(scratch, threads);
        x_ = scratch.part<float>(tokens_ * hidden);
        normed_ = scratch.part<float>(tokens_ * hidden);
        entry_ = scratch.part<float>(tokens_ * hidden);
        attended_ = scratch.part<float>(tokens_ * hidden);
        fed_ = scratch.part<float>(tokens_ * hidden);
        joined_ = scratch.part<float>(tokens_ * joined);
        const int64_t few = tokens_ < kManyRows ? tokens_ : 0;
        const int64_t beside =
            most(most(InputBranch::widest(call), StreamRows::widest(call)), SelectiveScan::widest(call));
        const int64_t widest = most(most(hidden, joined), beside);
        products_.take(
            scratch, {tokens_, most(widest, rounded), few, most(widest, inner), few * kMostColumns}, threads);
        if (tokens_ >= kFewestInPanels)
            packed_inner_ = scratch.part<char>(packed_bytes(tokens_, inner));
        if (Vec::kBf16Dot && tokens_ < kManyRows) {
            rounded_ = scratch.part<Bf16>(tokens_ * hidden);
            rounded_joined_ = scratch.part<Bf16>(tokens_ * joined);
        }
        few_.take(scratch, inner, few);
        heads_.take(scratch, call);
        latent_.take(scratch, call, threads);
        recurrent_.take(scratch, call, threads);
        experts_.take(scratch, MostOfExperts(call), tokens_, threads);
        const bool rounds = Vec::kBf16Dot && tokens_ < kManyRows;
        inputs_.take(scratch, call, rounds);
        streams_.take(scratch, call, rounds);
        sparse_.take(scratch, call, rounds);
        bytes_ = scratch.used();
    }

    int64_t bytes() const { return bytes_; }

    // The output of the last block, `(T, C)`, or `(T, S, C)` with streams.
    const float* left() const { return streams_.any() ? streams_.row(0) : x_; }

    // `read(t, row)` writes the input of the first block; `write(t, row)` receives the output of the last
    // one, both of all streams. The first thread calls `meanwhile()` in the first block before the
    // feed-forward, where the other threads have the most to do. Returns false if the matrices of a block
    // could not be made available.
    template <class Read, class Write, class Meanwhile>
    bool run(Team& team, int rank, Read read, Write write, Meanwhile meanwhile) {
        each_one(team, tokens_, [&](int64_t t) {
            read(t, state(t));
            if (!enters_late(layers_.first))
                enter(layers_.first, t);
        });
        for (int64_t i = layers_.first; i < layers_.end; ++i) {
            const Block& b = call_.blocks[i];
            if (!(i == layers_.first && layers_.from_feed) && !turn(team, rank, i))
                return false;
            if (enters_late(i))
                each_one(team, tokens_, [&](int64_t t) { enter(i, t); });
            if (layers_.mixes(call_, i)) {
                attention(b, i, team, rank);
                if (!b.parallel)
                    each_one(team, tokens_, [&](int64_t t) { between(i, t); });
            }
            if (b.across) {
                across(b, i, team, rank);
                each_one(team, tokens_, [&](int64_t t) { answered(b, t); });
            }
            if (rank == 0 && i == layers_.first)
                meanwhile();
            const bool feeds = layers_.feeds(call_, i);
            if (feeds)
                feed_forward(b, i, team, rank);
            if (feeds && b.inputs)
                weigh_in(b, i, team, rank);
            const bool splits = i + 1 == layers_.end && layers_.to_attention;
            each_one(team, tokens_, [&](int64_t t) {
                if (feeds && b.inputs)
                    take_in(b, t);
                else if (feeds)
                    leave(b, t);
                if (!splits)
                    scale_row(x_ + t * b.hidden, b.hidden, b.layer_scale);
                if (i + 1 < layers_.end && !enters_late(i + 1))
                    enter(i + 1, t);
                else if (i + 1 == layers_.end)
                    write(t, state(t));
            });
            if (!splits && !turn(team, rank, i))
                return false;
        }
        return true;
    }

private:
    // The residual stream of a token, or all of its streams.
    float* state(int64_t t) const {
        return streams_.any() ? streams_.row(t) : x_ + t * call_.blocks[layers_.first].hidden;
    }

    // Whether what a layer does first needs its matrices, which `turn` brings.
    bool enters_late(int64_t layer) const { return call_.turn && call_.blocks[layer].streams; }

    // The normed rows, as a matrix reads them.
    Rows normed(const Block& b, const Matrix& m) const {
        return {normed_, rounds_rows(m, tokens_) ? rounded_ : nullptr, b.hidden, tokens_};
    }

    bool turn(Team& team, int rank, int64_t block) const {
        if (!call_.turn)
            return true;
        if (rank == 0)
            call_.turn(block);
        team.meet();
        const bool failed = *call_.failed;
        team.meet(); // the next call may set `failed` at once: all must have read it
        return !failed;
    }

    Spans spans(const Block& b) const { return spans_of(call_.step, call_.caches, b.causal != 0); }

    // Computes the input of the attention and, for parallel branches with their own norm, of the
    // feed-forward.
    void enter(int64_t layer, int64_t t) {
        const Block& b = call_.blocks[layer];
        if (!layers_.mixes(call_, layer))
            return to_feed(b, t);
        const int64_t at = t * b.hidden;
        if (b.streams)
            streams_.predict(b, t, x_ + at);
        if (b.post)
            std::memcpy(normed_ + at, x_ + at, static_cast<size_t>(b.hidden) * sizeof(float));
        else
            norm_row(x_ + at, normed_ + at, b.hidden, b.attn_norm);
        if (b.multipliers)
            multiply_row(normed_ + at, b.hidden, b.multipliers->attention_in);
        if (rounds_entry(b, tokens_))
            copy_row(normed_ + at, rounded_ + at, b.hidden);
        if (b.parallel && b.mlp_norm.kind != kNoNorm)
            norm_row(x_ + at, entry_ + at, b.hidden, b.mlp_norm);
    }

    void attention(const Block& b, int64_t layer, Team& team, int rank) {
        if (rank == 0 && layers_.replans(call_, layer))
            make_plan(spans(b), heads_of(call_, b), team, room_);
        if (attends(b))
            attend_to(b, layer, team, rank);
        if (b.streams)
            streams_.run(b, normed(b, b.streams->narrow_in), products_, team, rank,
                         next_.of(b.streams->narrow_out, team), next_.feed(layer, team));
        if (b.recurrence)
            remember(b, layer, team, rank);
    }

    void attend_to(const Block& b, int64_t layer, Team& team, int rank) {
        Bf16* rounded = rounds_rows(b.attn_out, tokens_) ? rounded_joined_ : nullptr;
        if (b.latent)
            latent_.run(call_, layer, normed_, rounded_, joined_, rounded, room_, team, rank);
        else
            heads_.run(call_, layer, normed(b, b.qkv), joined_, rounded, products_, room_, team, rank,
                       next_.of(b.attn_out, team));
        project(products_, {joined_, rounded, b.attn_out.inputs, tokens_}, b.attn_out, attended_, team, rank,
                b.recurrence ? next_.of(b.recurrence->projections[0], team)
                : b.across   ? next_.of(b.across->q, team)
                : b.streams  ? next_.of(b.streams->narrow_in, team)
                             : next_.feed(layer, team));
    }

    // Runs the mixer: to `attended_` in place of attention, or beside it to `entry_`, which only parallel
    // blocks use otherwise.
    void remember(const Block& b, int64_t layer, Team& team, int rank) {
        const Matrix& out = b.recurrence->out;
        Bf16* rounded = rounds_rows(out, tokens_) ? rounded_joined_ : nullptr;
        recurrent_.run(call_, layer, normed_, rounded_, joined_, rounded, products_, team, rank,
                       next_.of(out, team));
        project(products_, {joined_, rounded, out.inputs, tokens_}, out, b.beside ? entry_ : attended_, team,
                rank, next_.feed(layer, team));
    }

    // Cross-attention to the states of an encoder.
    void across(const Block& b, int64_t layer, Team& team, int rank) {
        const Across& c = *b.across;
        const int64_t joined = b.heads * b.head_dim;
        if (rank == 0 && layers_.replans_across(call_, layer))
            make_plan(spans_across(call_.step, c), heads_of(call_, b), team, across_room_);
        float* queries = heads_.projected();
        project(products_, normed(b, c.q), c.q, queries, team, rank, next_.of(c.out, team));
        Bf16* rounded = rounds_rows(c.out, tokens_) ? rounded_joined_ : nullptr;
        Attention a = to_states(heads_of(call_, b), c);
        a.q = {queries, kFloat32, 0, joined, b.head_dim};
        a.out = {joined_, kFloat32, 0, joined, b.head_dim};
        a.rounded = rounded;
        a.pairs = multiplies_pairs(call_.dtype, c.dtype);
        attend(a, team, rank, across_room_);
        const Rows out = {joined_, rounded, joined, tokens_};
        project(products_, out, c.out, attended_, team, rank, next_.feed(layer, team));
    }

    // Adds the attention's output to the residual stream and prepares the next branch's input.
    void between(int64_t layer, int64_t t) {
        const Block& b = call_.blocks[layer];
        const int64_t at = t * b.hidden;
        if (b.post) {
            add(b, x_ + at, x_ + at, attended_ + at, b.attn_scale);
            norm_row(x_ + at, x_ + at, b.hidden, b.attn_norm);
        } else {
            join_mixer(b, attended_ + at, entry_ + at);
            norm_row(attended_ + at, attended_ + at, b.hidden, b.attn_post_norm);
            add(b, x_ + at, b.residual_from_norm ? normed_ + at : x_ + at, attended_ + at, b.attn_scale);
        }
        if (b.streams)
            streams_.join(b, t, normed_ + at, x_ + at);
        if (!layers_.feeds(call_, layer))
            return;
        if (!b.across)
            return to_feed(b, t);
        copy_normed(b, b.across->norm, t);
        if (rounds_rows(b.across->q, tokens_))
            copy_row(normed_ + at, rounded_ + at, b.hidden);
    }

    // Adds the cross-attention's output to the residual stream and prepares the feed-forward's input.
    void answered(const Block& b, int64_t t) {
        const int64_t at = t * b.hidden;
        norm_row(attended_ + at, attended_ + at, b.hidden, b.across->post_norm);
        for (int64_t j = 0; j < b.hidden; j += Vec::kWidth) {
            const int64_t n = least(b.hidden - j, Vec::kWidth);
            (Vec::load(x_ + at + j, n) + Vec::load(attended_ + at + j, n)).store(x_ + at + j, n);
        }
        if (b.post)
            norm_row(x_ + at, x_ + at, b.hidden, b.across->norm);
        to_feed(b, t);
    }

    // Writes the next branch's input: the residual stream, normed unless the block norms sums (`post`).
    void copy_normed(const Block& b, const Norm& norm, int64_t t) {
        const int64_t at = t * b.hidden;
        if (b.post)
            std::memcpy(normed_ + at, x_ + at, static_cast<size_t>(b.hidden) * sizeof(float));
        else
            norm_row(x_ + at, normed_ + at, b.hidden, norm);
    }

    void to_feed(const Block& b, int64_t t) {
        const int64_t at = t * b.hidden;
        copy_normed(b, b.mlp_norm, t);
        if (b.multipliers)
            multiply_row(normed_ + at, b.hidden, b.multipliers->feed_in);
        const FeedForward feed = feed_of(b);
        const bool whole = b.sparse ? !many(tokens_, feed.first) : !feeds_many(feed, tokens_);
        if (feed.width && whole && rounds(feed.first, tokens_))
            copy_row(normed_ + at, rounded_ + at, b.hidden);
    }

    void feed_forward(const Block& b, int64_t layer, Team& team, int rank) {
        const FeedForward feed = feed_of(b);
        const bool apart = b.parallel && b.mlp_norm.kind != kNoNorm;
        const float* x = apart ? entry_ : normed_;
        const Following next = b.inputs ? next_.of(b.inputs->gate, team) : next_.layer(layer, team);
        if (b.sparse)
            return sparse_.run(b, normed(b, b.mlp_in), fed_, products_, team, rank, next_.of(b.mlp_out, team),
                               next);
        if (feed.width)
            feed_all(b, feed, x, team, rank, next);
        if (b.moe && b.moe->beside)
            hear_beside(b, team, rank);
        else if (b.moe)
            experts_.run(b, x, x, fed_, feed.width > 0, team, rank);
    }

    // Adds the experts that are a branch beside the shared ones.
    void hear_beside(const Block& b, Team& team, int rank) {
        const Moe& moe = *b.moe;
        each_one(team, tokens_, [&](int64_t t) {
            const int64_t at = t * b.hidden;
            norm_row(x_ + at, entry_ + at, b.hidden, moe.router_norm);
            multiply_row(entry_ + at, b.hidden, moe.router_scale);
            norm_row(x_ + at, normed_ + at, b.hidden, moe.entry_norm);
        });
        experts_.run(b, entry_, normed_, attended_, false, team, rank);
        each_one(team, tokens_, [&](int64_t t) {
            const int64_t at = t * b.hidden;
            norm_row(fed_ + at, fed_ + at, b.hidden, moe.shared_norm);
            norm_row(attended_ + at, attended_ + at, b.hidden, moe.norm);
            add_row(fed_ + at, fed_ + at, attended_ + at, b.hidden, 1.0f, Scale{});
        });
    }

    void feed_all(const Block& b, const FeedForward& feed, const float* x, Team& team, int rank,
                  const Following& next) {
        if (feeds_many(feed, tokens_)) {
            feed_many(
                feed, x, tokens_, products_.packed, packed_inner_, team, products_.own_of(rank),
                [&](const Piece& piece) { turn_piece(piece, fed_, b.hidden); }, next);
            return;
        }
        const bool rounded = rounds(feed.first, tokens_);
        // Rows that parallel branches share are rounded already if qkv reads them that way.
        if (rounded && b.parallel && (x == entry_ || !rounds_entry(b, tokens_)))
            each_one(team, tokens_,
                     [&](int64_t t) { copy_row(x + t * b.hidden, rounded_ + t * b.hidden, b.hidden); });
        const Rows rows = {x, rounded ? rounded_ : nullptr, b.hidden, tokens_};
        feed_few(feed, rows, products_, few_, team, rank,
                 [&](const Operand& inner, int64_t begin, int64_t end) {
                     multiply(inner, feed.last, begin, end, fed_ + begin, b.hidden);
                 });
    }

    void leave(const Block& b, int64_t t) {
        const int64_t at = t * b.hidden;
        if (b.post) {
            add(b, x_ + at, x_ + at, fed_ + at, b.mlp_scale);
            norm_row(x_ + at, x_ + at, b.hidden, b.mlp_norm);
            return;
        }
        if (b.multipliers)
            multiply_row(fed_ + at, b.hidden, b.multipliers->feed_out);
        norm_row(fed_ + at, fed_ + at, b.hidden, b.mlp_post_norm);
        add(b, x_ + at, b.residual_from_norm ? normed_ + at : x_ + at, fed_ + at, b.mlp_scale);
        if (!b.parallel)
            return;
        norm_row(attended_ + at, attended_ + at, b.hidden, b.attn_post_norm);
        add(b, x_ + at, x_ + at, attended_ + at, b.attn_scale);
    }

    // Computes the branch of the block's own inputs, from the sum of the other two.
    void weigh_in(const Block& b, int64_t layer, Team& team, int rank) {
        const bool rounds = rounds_rows(b.inputs->gate, tokens_);
        each_one(team, tokens_, [&](int64_t t) {
            leave(b, t);
            if (b.streams)
                streams_.correct(b, t, x_ + t * b.hidden, fed_ + t * b.hidden);
            if (rounds)
                copy_row(x_ + t * b.hidden, rounded_ + t * b.hidden, b.hidden);
        });
        inputs_.run(call_, layer, {x_, rounds ? rounded_ : nullptr, b.hidden, tokens_}, fed_, products_, team,
                    rank, next_.of(b.inputs->out, team), next_.layer(layer, team));
    }

    void take_in(const Block& b, int64_t t) {
        const int64_t at = t * b.hidden;
        norm_row(fed_ + at, fed_ + at, b.hidden, b.inputs->norm);
        if (b.streams)
            return streams_.add(t, fed_ + at);
        add_row(x_ + at, x_ + at, fed_ + at, b.hidden, 1.0f, Scale{});
    }

    static void add(const Block& b, float* out, const float* residual, const float* branch,
                    const Scale& scale) {
        add_row(out, residual, branch, b.hidden, b.residual_scale, scale);
    }

    const StackCall& call_;
    const Layers layers_;
    const NextPanels next_;
    const int64_t tokens_;
    AttentionRoom room_, across_room_;
    float *x_, *normed_, *entry_, *attended_, *fed_, *joined_;
    char* packed_inner_ = nullptr; // rows packed into panels
    Bf16 *rounded_ = nullptr, *rounded_joined_ = nullptr;
    ProductRoom products_;
    FewScratch few_;
    HeadAttention heads_;
    LatentAttention latent_;
    Recurrent recurrent_;
    Experts experts_;
    InputBranch inputs_;
    StreamRows streams_;
    SparseFeed sparse_;
    int64_t bytes_;
};

} // namespace
} // namespace slipstream
