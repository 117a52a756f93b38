// The last part of a model on fewer rows: once all keys and values are written, only the tokens whose logits
// are computed go on. These are the feed-forward of the last layer that writes some, and the layers after it,
// which borrow keys and values or have none.
#pragma once

#include <vector>

namespace slipstream {
namespace {

class Narrowed {
public:
    // Splits the layers of a call. Does nothing unless some tokens go no further than the keys and values.
    explicit Narrowed(const ModelCall& call) : split_(whole(call.stack)) {
        const StackCall& stack = call.stack;
        if (call.rows >= stack.step.tokens || stack.step.past || (call.entered && call.num_entered > 1))
            return;
        int64_t first = stack.num_blocks; // of those after the last that writes
        while (first > 0 && !writes(stack.blocks[first - 1]))
            --first;
        if (first == 0) // no layer would be left for all tokens
            return;
        const bool splits = separable(stack.blocks[first - 1]);
        any_ = (first < stack.num_blocks || splits) && follow(call);
        if (any_)
            split_ = {{0, first, false, splits},
                      {splits ? first - 1 : first, stack.num_blocks, splits, false}};
    }

    bool any() const { return any_; }

    // The layers that all tokens go through, and those of the rows alone.
    const Layers& front() const { return split_.front; }
    const Layers& back() const { return split_.back; }

    // The call for `back`; without the blocks' own inputs.
    StackCall of_rows(const StackCall& call) const {
        StackCall few = call;
        few.positions = positions_.data();
        few.places = places_.data();
        few.inputs = nullptr;
        few.step.tokens = few.step.sequences = static_cast<int64_t>(lens_.size());
        few.step.query_starts = starts_.data();
        few.step.kv_lens = lens_.data();
        few.step.block_table = pages_.data();
        few.step.slots = nullptr; // nothing is written
        few.step.states = nullptr;
        return few;
    }

private:
    struct Split {
        Layers front, back;
    };

    static Split whole(const StackCall& call) { return {all_layers(call), {}}; }

    static bool writes(const Block& b) { return mixes(b) && b.keys_values != kBorrowed; }

    static bool separable(const Block& b) {
        return b.branches == kBothBranches && !b.post && !b.parallel && !b.across && !b.streams;
    }

    // Makes the step of the rows; returns false unless each row is the last token of a sequence of its own.
    bool follow(const ModelCall& call) {
        const Step& step = call.stack.step;
        starts_.push_back(0);
        for (int64_t n = 0, r = 0; n < step.sequences && r < call.rows; ++n) {
            const int64_t row = call.logit_rows[r];
            if (step.query_starts[n] == step.query_starts[n + 1] || step.query_starts[n + 1] - 1 != row)
                continue;
            positions_.push_back(call.stack.positions ? call.stack.positions[row] : row);
            places_.push_back(call.positions[row]);
            lens_.push_back(step.kv_lens[n]);
            const int32_t* pages = step.block_table + n * step.table_width;
            pages_.insert(pages_.end(), pages, pages + step.table_width);
            starts_.push_back(static_cast<int32_t>(++r));
        }
        return static_cast<int64_t>(lens_.size()) == call.rows;
    }

    Split split_;
    bool any_ = false;
    std::vector<int32_t> starts_, lens_, pages_;
    std::vector<int64_t> positions_, places_;
};

} // namespace
} // namespace slipstream
