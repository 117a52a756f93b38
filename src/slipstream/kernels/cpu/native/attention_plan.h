// Divides attention into work items: which queries, kv heads and keys a thread processes together, in order
// of decreasing cost.
#pragma once

namespace slipstream {
namespace {

// Maximum rows (query heads times queries) of a tile; they share the cost of packing the keys.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileTokens = 64; // maximum queries of one sequence in a tile
constexpr int64_t kPieces = 4;      // items per thread, for load balance
constexpr int64_t kLeastKeys = 128; // minimum keys of a part, where the keys of a tile are divided
// kPieces and kLeastKeys for tiles of few rows, which are memory-bound.
constexpr int64_t kFewPieces = 2;
constexpr int64_t kLeastFew = 64;

// The sequences of a call: where their queries are and how many keys each has.
struct Spans {
    int64_t sequences;
    const int32_t* query_starts; // `(N + 1,)` for packed tokens; null: padded, `queries` each
    const int32_t* kv_lens;      // `(N,)`; null: `keys` each, or, if packed, as many as queries
    int64_t queries, keys;
    bool causal;         // query i sees keys up to i + keys - queries; otherwise all keys
    bool packed;         // keys are in the same rows as the queries, from query_starts on
    const int32_t* seen; // `(N,)`: a mask hides all keys from this one on; or null
};

// A unit of work: some queries of one sequence, some kv heads, some of the keys.
struct Item {
    int64_t sequence, token, count; // queries [token, token + count)
    int64_t position;               // of the first of these queries, counted in keys
    int64_t keys_at;                // row of key 0, if keys are in plain rows
    int64_t begin, end;             // keys [begin, end)
    int64_t kv, kvs;                // kv heads [kv, kv + kvs)
    int64_t part, parts;            // this item is part `part` of `parts` along the keys
    int64_t partial; // index of the first row of this part's result, if there are several parts
    int64_t join;    // index of the counter of finished parts
    int64_t cost;
};

struct Heads {
    int64_t heads, kv_heads, dim;
    int64_t tile_rows = kTileRows, tile_tokens = kTileTokens;
    int64_t group() const { return heads / kv_heads; }
    // Whether this many queries of a sequence multiply with keys in place, without packing them.
    bool few(int64_t queries) const { return queries * group() <= kFewQueries; }
    int64_t width() const { return ceil_div(dim, Vec::kWidth) * Vec::kWidth; }
    int64_t most_rows() const { return most(tile_rows, group()); }
    int64_t most_tokens() const { return most(1, least(tile_tokens, tile_rows / group())); }
};

// The list of items, kept in scratch; written by one thread and read by all.
struct Plan {
    Item* items;
    int64_t count, partial_rows;
};

// Upper bounds on the size of a plan that hold for any lengths of the sequences, which may grow from step to
// step: the total cost amounts to at most kPieces per thread, and each part of an item either has the cost of
// a piece or is the item's last.
struct PlanBounds {
    PlanBounds(const Spans& spans, const Heads& heads, int threads) {
        const int64_t size = heads.most_tokens(), pieces = kPieces * static_cast<int64_t>(threads);
        int64_t tiles = 0, longest = 0;
        for (int64_t n = 0; n < spans.sequences; ++n) {
            const int64_t queries =
                spans.query_starts ? spans.query_starts[n + 1] - spans.query_starts[n] : spans.queries;
            tiles += ceil_div(queries, size);
            longest = most(longest, least(queries, size));
        }
        items = tiles * heads.kv_heads + pieces;
        partial_rows = threads > 1 ? 2 * pieces * least(heads.most_rows(), heads.heads * longest) : 0;
    }
    int64_t items, partial_rows;
};

class Planner {
public:
    Planner(const Spans& spans, const Heads& heads, int threads, Item* items)
        : spans_(spans), heads_(heads), plan_({items, 0, 0}), threads_(threads) {
        over_tiles([&](const Item& tile) { total_ += tile.cost * heads_.kv_heads; });
        over_tiles([&](const Item& tile) { add(tile); });
        sort();
    }

    const Plan& plan() const { return plan_; }

private:
    template <class F>
    void over_tiles(F f) const {
        const int64_t size = heads_.most_tokens();
        for (int64_t n = 0; n < spans_.sequences; ++n) {
            const int64_t begin = spans_.query_starts ? spans_.query_starts[n] : 0;
            const int64_t end = spans_.query_starts ? spans_.query_starts[n + 1] : spans_.queries;
            const int64_t own = spans_.packed ? end - begin : spans_.keys;
            const int64_t keys = spans_.kv_lens ? spans_.kv_lens[n] : own;
            for (int64_t t = begin; t < end; t += size) {
                // Packed sequences are complete, and may end with tokens that are not keys; otherwise the
                // queries are the last tokens of their sequence.
                const int64_t count = least(size, end - t);
                const int64_t position = spans_.packed ? t - begin : keys - (end - t);
                const int64_t last = spans_.causal ? least(position + count, keys) : keys;
                f({n, t, count, position, spans_.packed ? begin : 0, 0, last, 0, 1, 0, 1, 0, 0,
                   most(last, 0) * (count * heads_.group() + 8)});
            }
        }
    }

    // Add the items of a tile, given for one kv head. While the rows are few, an item covers several kv
    // heads, whose keys are adjacent in memory; where threads would otherwise be idle, the keys are divided
    // into parts.
    void add(Item item) {
        const int64_t rows = item.count * heads_.group(), each = item.cost;
        const bool few = heads_.few(item.count);
        const int64_t least_keys = few ? kLeastFew : kLeastKeys, limit = limit_of(few);
        const bool splits = item.end >= 2 * least_keys;
        int64_t kvs = most(1, least(heads_.kv_heads, heads_.tile_rows / rows));
        if (!splits)
            kvs = most(1, least(kvs, limit / most(each, 1)));
        if (spans_.seen)
            item.end = least(item.end, spans_.seen[item.sequence]);
        for (item.kv = 0; item.kv < heads_.kv_heads; item.kv += kvs) {
            item.kvs = least(kvs, heads_.kv_heads - item.kv);
            const int64_t wanted = splits ? ceil_div(each * item.kvs, most(limit, 1)) : 1;
            int64_t parts = most(1, least(wanted, item.end / least_keys));
            if (few && parts > threads_)
                parts -= parts % threads_;
            const int64_t step = few ? Vec::kWidth : kTileKeys;
            share(item, ceil_div(ceil_div(item.end, parts), step) * step);
        }
    }

    // Return the maximum cost of an item: a few items per thread balance the load; a single thread needs no
    // division.
    int64_t limit_of(bool few) const {
        return threads_ > 1 ? ceil_div(total_, (few ? kFewPieces : kPieces) * threads_) : total_;
    }

    // Add one item per part of `size` keys.
    void share(Item part, int64_t size) {
        const int64_t end = part.end, rows = part.count * heads_.group() * part.kvs;
        part.parts = most(1, ceil_div(end, most(size, 1)));
        part.cost = part.cost * part.kvs / part.parts;
        part.join = plan_.count;
        for (part.part = 0; part.part < part.parts; ++part.part) {
            part.begin = part.part * size;
            part.end = least(part.begin + size, end);
            part.partial = plan_.partial_rows;
            plan_.partial_rows += part.parts > 1 ? rows : 0;
            plan_.items[plan_.count++] = part;
        }
    }

    // Sort by descending cost. Source: Shell 1959 (CACM 2:7), with Knuth's steps.
    void sort() {
        int64_t step = 1;
        while (step < plan_.count / 3)
            step = 3 * step + 1;
        for (; step > 0; step /= 3)
            for (int64_t i = step; i < plan_.count; ++i) {
                const Item moved = plan_.items[i];
                int64_t j = i;
                for (; j >= step && plan_.items[j - step].cost < moved.cost; j -= step)
                    plan_.items[j] = plan_.items[j - step];
                plan_.items[j] = moved;
            }
    }

    const Spans& spans_;
    const Heads& heads_;
    Plan plan_;
    const int64_t threads_;
    int64_t total_ = 0;
};

} // namespace
} // namespace slipstream
