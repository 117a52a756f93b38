// The function table of one instruction set. Every isa_*.cpp provides the same functions; they do not
// validate their arguments (check.cpp does).
#pragma once

#include "abi.h"
#include "pool.h"
#include "ties.h"

namespace slipstream {

struct Kernels {
    // Bytes of scratch that a call needs for a team of `threads`.
    int64_t (*linear_bytes)(const LinearCall&, int threads);
    int64_t (*feed_bytes)(const FeedCall&, int threads);
    int64_t (*experts_bytes)(const ExpertsCall&, int threads);
    int64_t (*draw_bytes)(const DrawCall&, int threads);
    int64_t (*norm_bytes)(const NormCall&, int threads);
    int64_t (*attention_bytes)(const AttentionCall&, int threads);
    int64_t (*paged_attention_bytes)(const PagedAttentionCall&, int threads);
    int64_t (*stack_bytes)(const StackCall&, int threads);
    int64_t (*text_bytes)(const TextCall&, int threads);
    int64_t (*pack_bytes)(const PackCall&, int threads);
    int64_t (*sketch_bytes)(const SketchCall&, int threads);
    int64_t (*model_bytes)(const ModelCall&, int threads);
    // Run by every thread of a team; `scratch` is shared and aligned to 64 bytes.
    void (*linear)(const LinearCall&, char* scratch, Team&, int rank);
    void (*feed)(const FeedCall&, char* scratch, Team&, int rank);
    void (*experts)(const ExpertsCall&, char* scratch, Team&, int rank);
    void (*draw)(const DrawCall&, char* scratch, Team&, int rank);
    void (*norm)(const NormCall&, char* scratch, Team&, int rank);
    void (*attention)(const AttentionCall&, char* scratch, Team&, int rank);
    void (*paged_attention)(const PagedAttentionCall&, char* scratch, Team&, int rank);
    void (*stack)(const StackCall&, char* scratch, Team&, int rank);
    void (*text)(const TextCall&, char* scratch, Team&, int rank);
    void (*pack)(const PackCall&, char* scratch, Team&, int rank);
    void (*sketch)(const SketchCall&, char* scratch, Team&, int rank);
    void (*model)(const ModelCall&, char* scratch, Team&, int rank);
};

// The tables that may be built, one per isa_*.cpp.
extern const Kernels kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxEmulated;

} // namespace slipstream
