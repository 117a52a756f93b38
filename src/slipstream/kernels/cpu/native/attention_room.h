// The scratch of attention that belongs to one thread.
#pragma once

namespace slipstream {
namespace {

// What one thread holds of an item.
struct ItemRoom {
    // Slots of the queries and of the keys; P is the way to multiply.
    template <class P>
    static int64_t slots_of(const Heads& heads) {
        return ceil_div(ceil_div(heads.dim, P::kDepth), P::kSlots) * P::kSlots;
    }
    ItemRoom(const Heads& heads, int64_t slots, int64_t strip, float* base) {
        const int64_t rows = heads.most_rows();
        Scratch scratch(reinterpret_cast<char*>(base));
        q = scratch.part<float>(rows * slots);
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
    float *q, *sums, *keys, *values; // slots: queries, packed keys and values; sums of weighted values
    float *top, *total;              // of each row: the highest score, the lanes of the weights' sum
    float* slope;                    // of each row, in units of ln 2
    int32_t *query, *head;           // of each row: which of the item's queries and heads; divisions are slow
    float *scores, *weights;         // of a strip
    float *k_scales, *v_scales, *bias;
    int64_t floats;
};

} // namespace
} // namespace slipstream
