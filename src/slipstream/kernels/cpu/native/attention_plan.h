// Shares attention out: which queries, kv heads and keys are worked on together, the longest work first.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kTileRows = 128;  // query heads times queries; the layout of keys is paid for by them
constexpr int64_t kTileTokens = 64; // queries of one sequence
constexpr int64_t kPieces = 4;      // per thread, to even them out
constexpr int64_t kLeastKeys = 128; // of a part, where the keys of a tile are shared out

// The sequences of a call: where their queries lie and how many keys each has.
struct Spans {
    int64_t sequences;
    const int32_t* query_starts; // `(N + 1,)` of packed tokens, or null: `queries` each, padded
    const int32_t* kv_lens;      // `(N,)`, or null: `keys` each, or where packed as many as queries
    int64_t queries, keys;
    bool causal;         // query i sees keys up to i + keys - queries; otherwise all of them
    bool packed;         // keys lie as the queries do, in the rows from query_starts on
    const int32_t* seen; // `(N,)`, keys from which on a mask hides all; or null
};

// Some queries of one sequence, some kv heads, some of the keys.
struct Item {
    int64_t sequence, token, count; // queries [token, token + count)
    int64_t position;               // of the first of them among the keys
    int64_t keys_at;                // the row of key 0, where they lie in rows
    int64_t begin, end;             // keys
    int64_t kv, kvs;                // kv heads [kv, kv + kvs)
    int64_t part, parts;            // of the keys
    int64_t partial;                // the first row of this part's result, where there are several
    int64_t cost;
};

struct Heads {
    int64_t heads, kv_heads, dim;
    int64_t group() const { return heads / kv_heads; }
    int64_t width() const { return ceil_div(dim, Vec::kWidth) * Vec::kWidth; }
    int64_t most_rows() const { return most(kTileRows, group()); }
    int64_t most_tokens() const { return most(1, least(kTileTokens, kTileRows / group())); }
};

// What was decided; kept in scratch, made by one thread and read by all.
struct Plan {
    Item* items;
    int64_t count, partial_rows;
};

// Bounds of a plan that hold whatever the sequences' lengths are, for those may grow from step to step: there
// are kPieces per thread of the whole cost at most, and a part of an item costs a piece or ends it.
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
        : spans_(spans), heads_(heads), plan_({items, 0, 0}) {
        int64_t total = 0;
        over_tiles([&](const Item& tile) { total += tile.cost * heads_.kv_heads; });
        // A few pieces per thread even them out; one thread needs no pieces.
        limit_ = threads > 1 ? ceil_div(total, kPieces * static_cast<int64_t>(threads)) : total;
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
                const int64_t count = least(size, end - t), position = keys - (end - t);
                const int64_t last = spans_.causal ? position + count : keys;
                f({n, t, count, position, spans_.packed ? begin : 0, 0, last, 0, 1, 0, 1, 0,
                   most(last, 0) * (count * heads_.group() + 8)});
            }
        }
    }

    // A tile of one kv head as items: several kv heads together while their rows are few, for their keys lie
    // side by side; a part of the keys each where that leaves threads without work.
    void add(Item item) {
        const int64_t rows = item.count * heads_.group(), each = item.cost;
        const bool splits = item.end >= 2 * kLeastKeys;
        int64_t kvs = most(1, least(heads_.kv_heads, kTileRows / rows));
        if (!splits)
            kvs = most(1, least(kvs, limit_ / most(each, 1)));
        if (spans_.seen)
            item.end = least(item.end, spans_.seen[item.sequence]);
        for (item.kv = 0; item.kv < heads_.kv_heads; item.kv += kvs) {
            item.kvs = least(kvs, heads_.kv_heads - item.kv);
            const int64_t wanted = splits ? ceil_div(each * item.kvs, most(limit_, 1)) : 1;
            const int64_t most_parts = most(1, least(wanted, item.end / kLeastKeys));
            share(item, whole(ceil_div(item.end, most_parts)));
        }
    }

    // Parts of `size` keys.
    void share(Item part, int64_t size) {
        const int64_t end = part.end, rows = part.count * heads_.group() * part.kvs;
        part.parts = most(1, ceil_div(end, most(size, 1)));
        part.cost = part.cost * part.kvs / part.parts;
        for (part.part = 0; part.part < part.parts; ++part.part) {
            part.begin = part.part * size;
            part.end = least(part.begin + size, end);
            part.partial = plan_.partial_rows;
            plan_.partial_rows += part.parts > 1 ? rows : 0;
            plan_.items[plan_.count++] = part;
        }
    }

    static int64_t whole(int64_t keys) { return ceil_div(keys, kTileKeys) * kTileKeys; }

    // By falling cost. Source: Shell 1959 (CACM 2:7), with Knuth's steps.
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
    int64_t limit_ = 0;
};

} // namespace
} // namespace slipstream
