// Which layers of a call run, and where the plan of attention has to be made anew.
#pragma once

namespace slipstream {
namespace {

// The layers [first, end), without the attention of the first or the feed-forward of the last one where the
// flags say so.
struct Layers {
    int64_t first, end;
    bool from_feed, to_attention;

    // Whether a branch of a layer is among those that run.
    bool mixes(const StackCall& call, int64_t i) const {
        return ::slipstream::mixes(call.blocks[i]) && !(i == first && from_feed);
    }
    bool feeds(const StackCall& call, int64_t i) const {
        return ::slipstream::feeds(call.blocks[i]) && !(i + 1 == end && to_attention);
    }
    bool attends(const StackCall& call, int64_t i) const {
        return mixes(call, i) && ::slipstream::attends(call.blocks[i]);
    }

    // Whether the plan of the previous layer that has attention does not fit this one.
    bool replans(const StackCall& call, int64_t layer) const {
        if (!attends(call, layer))
            return false;
        int64_t last = layer - 1;
        while (last >= first && !attends(call, last))
            --last;
        if (last < first)
            return true;
        const Block &b = call.blocks[layer], &before = call.blocks[last];
        const Heads heads = heads_of(call, b), others = heads_of(call, before);
        return heads.heads != others.heads || heads.kv_heads != others.kv_heads || heads.dim != others.dim ||
               b.causal != before.causal;
    }

    // Whether the plan of the previous layer that has cross-attention does not fit this one.
    bool replans_across(const StackCall& call, int64_t layer) const {
        const Block& b = call.blocks[layer];
        for (int64_t i = layer; i > first; --i) {
            const Block& before = call.blocks[i - 1];
            if (before.across)
                return b.heads != before.heads || b.kv_heads != before.kv_heads ||
                       b.head_dim != before.head_dim || b.across->states != before.across->states ||
                       b.across->seen != before.across->seen;
        }
        return true;
    }
};

// Whether the rows that enter a block are rounded to bfloat16 in place.
inline bool rounds_entry(const Block& b, int64_t tokens) {
    if (b.recurrence && Recurrent::rounds_entry(*b.recurrence, tokens))
        return true;
    if (!attends(b))
        return false;
    if (b.streams && rounds_rows(b.streams->narrow_in, tokens))
        return true;
    if (!b.latent)
        return rounds_rows(b.qkv, tokens);
    const Latent& l = *b.latent;
    return rounds_rows(l.down, tokens) || rounds_rows(l.query_down.outputs ? l.query_down : b.qkv, tokens);
}

inline Layers all_layers(const StackCall& call) {
    return {0, call.num_blocks, false, false};
}

} // namespace
} // namespace slipstream
