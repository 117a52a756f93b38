// Which panels to prefetch near the end of a product: those of the matrix that is multiplied next.
#pragma once

namespace slipstream {
namespace {

class NextPanels {
public:
    NextPanels(const StackCall& call, const Layers& layers)
        : call_(call), layers_(layers), tokens_(call.step.tokens) {}

    Following of(const Matrix& m, const Team& team) const {
        return following(m, m.outputs, 0, tokens_, team.size());
    }

    // Of the feed-forward of a layer.
    Following feed(int64_t layer, const Team& team) const {
        const Block& b = call_.blocks[layer];
        if (!layers_.feeds(call_, layer))
            return {};
        if (b.sparse)
            return of(b.mlp_in, team);
        const FeedForward feed = feed_of(b);
        if (!feed.width || !feeds_many(feed, tokens_))
            return {};
        return following(feed.first, feed.width, feed.gated ? feed.width : 0, tokens_, team.size());
    }

    // Of the layer after one. Streamed matrices (`turn`) have no address until they are loaded, so they
    // cannot be prefetched.
    Following layer(int64_t layer, const Team& team) const {
        return call_.turn || layer + 1 == layers_.end ? Following() : enters(layer + 1, team);
    }

private:
    Following enters(int64_t layer, const Team& team) const {
        const Block& b = call_.blocks[layer];
        if (!layers_.mixes(call_, layer))
            return feed(layer, team);
        if (!attends(b))
            return of(b.recurrence->projections[0], team);
        return of(b.latent && b.latent->query_down.outputs ? b.latent->query_down : b.qkv, team);
    }

    const StackCall& call_;
    const Layers& layers_;
    const int64_t tokens_;
};

} // namespace
} // namespace slipstream
