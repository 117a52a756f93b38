// A text encoder in one job: embedding lookups, the stack of blocks, the pooler.
#pragma once

namespace slipstream {
namespace {

struct TextScratch {
    TextScratch(const TextCall& call, char* base, int threads) {
        const StackCall& layers = call.stack;
        const int64_t tokens = layers.step.tokens, hidden = layers.blocks[0].hidden;
        const bool projects = call.project_in.outputs > 0, pools = call.pooler.outputs > 0;
        Scratch scratch(base);
        embedded = scratch.part<float>(projects ? tokens * call.width : 0);
        entering = scratch.part<float>(projects ? tokens * hidden : 0);
        pooled = scratch.part<float>(pools ? layers.step.sequences * hidden : 0);
        rest = base + scratch.used();
        if (base)
            return;
        bytes = stack_bytes(layers, threads);
        if (projects)
            bytes = most(bytes, linear_bytes(project_in(call), threads));
        if (pools)
            bytes = most(bytes, linear_bytes(pool(call), threads));
        bytes += scratch.used();
    }

    LinearCall project_in(const TextCall& call) const {
        return {embedded, entering, call.stack.step.tokens, kFloat32, 0, call.project_in};
    }
    LinearCall pool(const TextCall& call) const {
        return {pooled, call.pooled, call.stack.step.sequences, call.stack.dtype, 0, call.pooler};
    }

    float *embedded, *entering; // input and output of the projection before the blocks
    void* pooled;               // input of the pooler, in the dtype of the call
    char* rest;
    int64_t bytes = 0;
};

inline int64_t text_bytes(const TextCall& call, int threads) {
    return TextScratch(call, nullptr, threads).bytes;
}

// Rounds x to the nearest numbers of a storage type.
inline void narrow_row(float* x, int32_t dtype, int64_t n) {
    if (dtype == kFloat32)
        return;
    with_dtype(dtype, [&](auto* type) {
        typename std::remove_pointer<decltype(type)>::type narrow[Vec::kWidth];
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            Vec::load(x + j, count).store(narrow, count);
            Vec::load(narrow, count).store(x + j, count);
        }
    });
}

// Computes the input of the first block, or of the projection before it, rounded where a model in the dtype
// of the call rounds: if rows are rounded to bytes later on, a small difference would be amplified.
inline void embed(const TextCall& call, int64_t t, float* row) {
    bool begun = false;
    for (const Lookup& l : call.lookups) {
        if (!l.table)
            continue;
        const int64_t at = (l.at ? l.at[t] : l.first + t % l.period) * call.width;
        if (begun)
            shift_row(row, l.table, l.dtype, at, call.width);
        else
            read_row(l.table, l.dtype, at, row, call.width);
        narrow_row(row, call.stack.dtype, call.width);
        begun = true;
    }
    norm_row(row, row, call.width, call.norm);
    narrow_row(row, call.stack.dtype, call.width);
}

// tanh(pooler x) for one token of each sequence, in the dtype of the call.
inline void pool(const TextCall& call, const TextScratch& scratch, Team& team, int rank) {
    const StackCall& layers = call.stack;
    const int64_t hidden = layers.blocks[0].hidden, outputs = call.pooler.outputs;
    const int64_t count = layers.step.sequences, grain = ceil_div(count, static_cast<int64_t>(team.size()));
    with_dtype(layers.dtype, [&](auto* type) {
        using T = typename std::remove_pointer<decltype(type)>::type;
        const auto size = static_cast<size_t>(hidden) * sizeof(T);
        each(team, count, grain, [&](int64_t begin, int64_t end) {
            for (int64_t n = begin; n < end; ++n) {
                const int64_t t = call.pooled_tokens ? call.pooled_tokens[n] : layers.step.query_starts[n];
                T* row = static_cast<T*>(scratch.pooled) + n * hidden;
                if (t < 0)
                    std::memset(static_cast<void*>(row), 0, size);
                else
                    std::memcpy(row, static_cast<const T*>(layers.out) + t * hidden, size);
            }
        });
        linear(scratch.pool(call), scratch.rest, team, rank);
        each(team, count, grain, [&](int64_t begin, int64_t end) {
            T* x = static_cast<T*>(call.pooled);
            for (int64_t j = begin * outputs; j < end * outputs; j += Vec::kWidth) {
                const int64_t n = least(end * outputs - j, Vec::kWidth);
                tangent(Vec::load(x + j, n)).store(x + j, n);
            }
        });
    });
}

inline void text(const TextCall& call, char* base, Team& team, int rank) {
    const TextScratch scratch(call, base, team.size());
    const int64_t tokens = call.stack.step.tokens, hidden = call.stack.blocks[0].hidden;
    const bool projects = call.project_in.outputs > 0;
    if (projects) {
        each_one(team, tokens, [&](int64_t t) { embed(call, t, scratch.embedded + t * call.width); });
        linear(scratch.project_in(call), scratch.rest, team, rank);
    }
    const bool complete = run_parts(call.stack, scratch.rest, team, rank, [&](int64_t t, float* row) {
        if (!projects)
            return embed(call, t, row);
        std::memcpy(row, scratch.entering + t * hidden, static_cast<size_t>(hidden) * sizeof(float));
        narrow_row(row, call.stack.dtype, hidden);
    });
    if (complete && call.pooler.outputs)
        pool(call, scratch, team, rank);
}

} // namespace
} // namespace slipstream
