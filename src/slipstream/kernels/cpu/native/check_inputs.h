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
    if (f.project_in.outputs || f.pos_embed || f.type_row || f.embed_norm.kind != kNoNorm)
        return kUnsupported;
    Status status = embedding(f.inputs_embed, all);
    status = first_of(status, exact_matrix(f.inputs_project, all, call.stack.blocks[0].hidden));
    status = first_of(status, norm(f.inputs_norm, width, width));
    if (status != kOk || f.inputs_rows)
        return first_of(status, f.inputs_rows >= 0 && f.inputs_rows <= f.inputs_embed.outputs ? kOk : kShape);
    for (int64_t t = 0; t < call.stack.step.tokens; ++t)
        if (call.token_ids[t] >= f.inputs_embed.outputs)
            return kRange;
    return f.num_placeholders && f.stand_in >= f.inputs_embed.outputs ? kRange : kOk;
}

// A dense matrix of which single rows are read.
Status dense_rows(const Matrix& m, int64_t outputs, int64_t inputs) {
    const Status status = exact_matrix(m, outputs, inputs);
    return status == kOk && m.format != kPlain ? kUnsupported : first_of(status, embedding(m, inputs));
}

// The streams of a block: as many in all blocks of a call.
Status streams(const Block& b, const StackCall& call) {
    constexpr int64_t kMostStreams = 8;
    const Streams* first = call.blocks[0].streams;
    if (!b.streams || !first)
        return b.streams || first ? kUnsupported : kOk;
    const Streams& s = *b.streams;
    if (!b.inputs || b.recurrence || b.across || b.multipliers || b.residual_from_norm ||
        b.layer_scale.weight)
        return kUnsupported;
    if (s.count < 2 || s.count > kMostStreams || s.count != first->count || s.active < 0 ||
        s.active >= s.count || !is_size(s.rank))
        return kShape;
    if (!fits(call.step.tokens, s.count * b.hidden) || !fits(call.step.tokens, s.rank))
        return kShape;
    Status status = dense_rows(s.router, s.count, b.hidden);
    status = first_of(status, dense_rows(s.predict, s.count * s.count, s.count));
    status = first_of(status, dense_rows(s.correct, s.count, s.count));
    status = first_of(
        status, first_of(matrix(s.narrow_in, s.rank, b.hidden), matrix(s.narrow_out, b.hidden, s.rank)));
    status = first_of(status, norm(s.router_norm, b.hidden, b.hidden));
    status = first_of(status, norm(s.narrow_norm, b.hidden, b.hidden));
    return first_of(status, optional(s.scale.weight, s.scale.dtype));
}

// A feed-forward with a sparse gate.
Status sparse(const Block& b, const StackCall& call) {
    if (!b.sparse)
        return kOk;
    if (b.sparse != 1 || b.moe || b.parallel || b.activation == kSwigluOai || !(b.cutoff - b.cutoff == 0.0f))
        return kUnsupported;
    return fits(call.step.tokens, b.gated ? 2 * b.ffn : b.ffn) ? kOk : kShape;
}

// What makes streams of embeddings, and states of streams.
Status splits(const ModelCall& call, const Frame& f) {
    const Streams* s = call.stack.blocks[0].streams;
    const int64_t hidden = call.stack.blocks[0].hidden;
    if (f.others != (s ? s->count - 1 : 0))
        return kShape;
    if (!s)
        return kOk;
    if (!f.split || !f.join)
        return kNull;
    if (call.entered && call.num_entered > 1)
        return kUnsupported;
    Status status = fits(call.rows, s->count * hidden) ? kOk : kShape;
    for (int64_t i = 0; i < f.others; ++i)
        status = first_of(status, first_of(exact_matrix(f.split[i], hidden, hidden),
                                           exact_matrix(f.join[i], hidden, hidden)));
    return status;
}

} // namespace
} // namespace slipstream
