// Checks of steps: starts, lengths, blocks, slots, and rows of states. Included by check.cpp alone.
#pragma once

#include "check_parts.h"

namespace slipstream {
namespace {

// A step with a paged cache; each sequence may grow by `more` tokens during the call.
Status step(const Step& s, bool writes, int64_t more = 0) {
    if (!is_size(s.tokens) || !is_size(s.sequences) || !is_size(s.table_width))
        return kShape;
    if (!is_size(s.cache_blocks) || !is_size(s.block_size))
        return kShape;
    if (s.heads_first < 0 || s.heads_first > 1 || (s.past && (!s.heads_first || !writes || more)))
        return kUnsupported;
    if (s.past < 0 || s.past > s.block_size)
        return kShape;
    if (!s.query_starts || !s.kv_lens || !s.block_table || (writes && !s.slots))
        return kNull;
    if (!is_aligned(s.query_starts, 4) || !is_aligned(s.kv_lens, 4) || !is_aligned(s.block_table, 4))
        return kAlignment;
    if (writes && !is_aligned(s.slots, 8))
        return kAlignment;
    if (s.query_starts[0] != 0 || s.query_starts[s.sequences] != s.tokens)
        return kRange;
    for (int64_t n = 0; n < s.sequences; ++n) {
        const int64_t queries = int64_t{s.query_starts[n + 1]} - s.query_starts[n], length = s.kv_lens[n];
        if (queries < 0 || s.query_starts[n + 1] > s.tokens || length < queries)
            return kRange;
        const int64_t used = (length + more + s.block_size - 1) / s.block_size;
        if (used > s.table_width)
            return kRange;
        for (int64_t i = 0; i < used; ++i) {
            const int32_t block = s.block_table[n * s.table_width + i];
            if (block < 0 || block >= s.cache_blocks)
                return kRange;
        }
    }
    for (int64_t t = 0; writes && t < s.tokens; ++t)
        if (s.slots[t] < 0 || s.slots[t] >= s.cache_blocks * s.block_size)
            return kRange;
    return kOk;
}

// A step without a cache: the first kv_lens[n] tokens of a sequence are its keys.
Status packed_step(const Step& s) {
    if (!is_size(s.tokens) || !is_size(s.sequences))
        return kShape;
    if (!s.query_starts || !s.kv_lens)
        return kNull;
    if (!is_aligned(s.query_starts, 4) || !is_aligned(s.kv_lens, 4))
        return kAlignment;
    if (s.query_starts[0] != 0 || s.query_starts[s.sequences] != s.tokens)
        return kRange;
    for (int64_t n = 0; n < s.sequences; ++n) {
        const int64_t queries = int64_t{s.query_starts[n + 1]} - s.query_starts[n];
        if (queries < 0 || s.query_starts[n + 1] > s.tokens || s.kv_lens[n] < 0 || s.kv_lens[n] > queries)
            return kRange;
    }
    return kOk;
}

// The states of a layer with a recurrence, and each sequence's row in them.
Status states(const Cache& c, const Step& s) {
    if (!s.states || !c.states)
        return kNull;
    if (!is_aligned(s.states, 4) || !is_aligned(c.states, 4))
        return kAlignment;
    if (!is_size(s.num_states))
        return kShape;
    for (int64_t n = 0; n < s.sequences; ++n) // ascending, so that no two sequences have the same
        if (s.states[n] < 0 || s.states[n] >= s.num_states || (n && s.states[n] <= s.states[n - 1]))
            return kRange;
    return kOk;
}

} // namespace
} // namespace slipstream
