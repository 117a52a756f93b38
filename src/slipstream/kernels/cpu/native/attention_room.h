// Scratch memory of attention: per thread, and per call.
#pragma once

namespace slipstream {
namespace {

// Buffers in which one thread processes an item.
struct ItemRoom {
    // Number of slots in a padded row of queries or keys; P selects how slots are multiplied.
    template <class P>
    static int64_t slots_of(const Heads& heads) {
        return ceil_div(ceil_div(heads.dim, P::kDepth), P::kSlots) * P::kSlots;
    }
    ItemRoom(const Heads& heads, int64_t slots, int64_t strip, float* base) {
        const int64_t rows = heads.most_rows();
        Scratch scratch(reinterpret_cast<char*>(base));
        q = scratch.part<float>((rows + kMostStripRows - 1) * slots); // the last strip may read a full one
        sums = scratch.part<float>(rows * heads.width());
        top = scratch.part<float>(rows);
        slope = scratch.part<float>(rows);
        query = scratch.part<int32_t>(rows);
        head = scratch.part<int32_t>(rows);
        total = scratch.part<float>(rows * Vec::kWidth);
        keys = scratch.part<float>(slots * kTileKeys);
        values = scratch.part<float>(kTileKeys * heads.width());
        scores = scratch.part<float>(strip * kTileKeys);
        weights = scratch.part<float>(strip * kTileKeys);
        k_scales = scratch.part<float>(kTileKeys);
        v_scales = scratch.part<float>(kTileKeys);
        bias = scratch.part<float>(kTileKeys);
        floats = scratch.used() / static_cast<int64_t>(sizeof(float));
    }
    // In slots: queries, packed keys and packed values. `sums`: weighted sums of values.
    float *q, *sums, *keys, *values;
    float *top, *total;      // per row: the highest score; the sum of the weights, lane by lane
    float* slope;            // per row, in units of ln 2
    int32_t *query, *head;   // per row: its query and head within the item, stored to avoid divisions
    float *scores, *weights; // of one strip
    float *k_scales, *v_scales, *bias;
    int64_t floats;
};

// Scratch for the attention of one call shape, or the maximum over several.
struct AttentionRoom {
    // Enlarge the sizes to what a call of this shape needs.
    void include(const Spans& spans, const Heads& heads, int threads) {
        const PlanBounds bounds(spans, heads, threads);
        num_items = most(num_items, bounds.items);
        num_partial = most(num_partial, bounds.partial_rows * (heads.width() + 2));
        own_floats =
            most(own_floats, ItemRoom(heads, most(heads.dim, kMostPadding), kMostStripRows, nullptr).floats);
    }
    void reserve(Scratch& scratch, int threads) {
        plan = scratch.part<Plan>(1);
        items = scratch.part<Item>(num_items);
        done = scratch.part<int32_t>(num_items);
        partial = scratch.part<float>(num_partial);
        own = scratch.part<float>(own_floats * threads);
    }
    int64_t num_items = 0, num_partial = 0, own_floats = 0;
    Plan* plan = nullptr;
    Item* items = nullptr;
    int32_t* done = nullptr; // finished parts of each item, indexed by `join`; zero between calls
    float *partial = nullptr, *own = nullptr;
};

// Plan a call. Run by one thread before the team's barrier; the plan is valid for all calls with the same
// spans and heads.
inline void make_plan(const Spans& spans, const Heads& heads, const Team& team, const AttentionRoom& room) {
    *room.plan = Planner(spans, heads, team.size(), room.items).plan();
    std::memset(room.done, 0, static_cast<size_t>(room.plan->count) * sizeof(int32_t));
}

} // namespace
} // namespace slipstream
