// Checks of the blocks' own inputs, and of the tables of embeddings. Included by check.cpp alone.
#pragma once

#include "check_parts.h"

namespace slipstream {
namespace {

// A block's branch of its own inputs; all blocks that have one are of the same width.
Status inputs(const Inputs& n, const Block& b, const StackCall& call) {
    if (b.post || b.parallel || b.branches != kBothBranches || b.activation == kSwigluOai)
        return kUnsupported;
    for (int64_t i = 0; i < call.num_blocks; ++i)
        if (call.blocks[i].inputs && call.blocks[i].inputs->width != n.width)
            return kShape;
    if (!is_size(n.width) || !is_size(call.num_blocks * n.width) ||
        !fits(call.step.tokens, call.num_blocks * n.width))
        return kShape;
    const Status status = first_of(matrix(n.gate, n.width, b.hidden), matrix(n.out, b.hidden, n.width));
    return first_of(status, norm(n.norm, b.hidden, b.hidden));
}

// The width of the blocks' own inputs; 0 if none has any.
int64_t width_of_inputs(const StackCall& call) {
    for (int64_t i = 0; i < call.num_blocks; ++i)
        if (call.blocks[i].inputs)
            return call.blocks[i].inputs->width;
    return 0;
}

// The inputs that are given for the blocks.
Status given_inputs(const StackCall& call) {
    const int64_t width = width_of_inputs(call);
    if (!width)
        return call.inputs ? kUnsupported : kOk;
    if (!call.inputs)
        return kNull;
    if (!is_aligned(call.inputs, 4))
        return kAlignment;
    return call.inputs_stride >= call.num_blocks * width && call.inputs_stride < kLargest ? kOk : kShape;
}

// The positions that blocks with `growth` read.
Status places(const StackCall& call) {
    for (int64_t i = 0; i < call.num_blocks; ++i)
        if (call.blocks[i].growth != 0.0f && !call.places)
            return kNull;
    return is_aligned(call.places, 8) ? kOk : kAlignment;
}

// A table of embeddings, with one row per token id.
Status embedding(const Matrix& m, int64_t width) {
    const Status status = exact_matrix(m, m.outputs, width);
    for (int64_t i = 0; status == kOk && i < m.num_runs; ++i)
        if (m.runs[i].transposed)
            return kUnsupported;
    return status;
}

// Tokens that are embedded as another one.
Status placeholders(const Frame& f) {
    if (f.num_placeholders < 0 || f.num_placeholders >= kLargest)
        return kShape;
    if (!f.num_placeholders)
        return kOk;
    if (!f.placeholders)
        return kNull;
    if (!is_aligned(f.placeholders, 8))
        return kAlignment;
    return f.stand_in >= 0 && f.stand_in < f.embed.outputs ? kOk : kRange;
}

// What the blocks' own inputs are made from.
Status makes_inputs(const ModelCall& call, const Frame& f) {
    const int64_t width = width_of_inputs(call.stack), all = call.stack.num_blocks * width;
    if (call.stack.inputs)
        return kUnsupported;
    if (!width)
        return f.inputs_embed.outputs || f.inputs_project.outputs ? kUnsupported : kOk;
    if (f.project_in.outputs || f.pos_embed || f.embed_norm.kind != kNoNorm)
        return kUnsupported;
    Status status = embedding(f.inputs_embed, all);
    status = first_of(status, exact_matrix(f.inputs_project, all, call.stack.blocks[0].hidden));
    status = first_of(status, norm(f.inputs_norm, width, width));
    for (int64_t t = 0; status == kOk && t < call.stack.step.tokens; ++t)
        if (call.token_ids[t] >= f.inputs_embed.outputs)
            return kRange;
    return status == kOk && f.num_placeholders && f.stand_in >= f.inputs_embed.outputs ? kRange : status;
}

} // namespace
} // namespace slipstream
