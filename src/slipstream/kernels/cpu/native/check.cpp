#include "check.h"

#include "check_inputs.h"
#include "check_parts.h"
#include "check_projections.h"
#include "check_steps.h"

namespace slipstream {
namespace {

Status block(const Block& b, const StackCall& call) {
    Status status = heads(b.heads, b.kv_heads, b.head_dim);
    if (status != kOk)
        return status;
    const bool mixes = b.branches != kOnlyFeed, feeds = b.branches != kOnlyAttention;
    if (b.branches < kBothBranches || b.branches >= kBranches ||
        (b.branches != kBothBranches && (b.post || b.parallel || b.across)) ||
        (!mixes && (b.latent || b.recurrence)))
        return kUnsupported;
    if (!is_size(b.hidden) || (feeds && !is_size(b.ffn)) || b.hidden != call.blocks[0].hidden)
        return kShape;
    if (!is_activation(b.activation, b.gated))
        return kUnsupported;
    if (b.qk_norm < kNoQkNorm || b.qk_norm > kWhole || b.gate < kNoGate || b.gate >= kGates)
        return kUnsupported;
    if (b.table < -1 || b.table >= call.num_tables)
        return kRange;
    const int64_t q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim, tokens = call.step.tokens;
    if (!fits(tokens, b.hidden) || (feeds && !fits(tokens, b.ffn)))
        return kShape;
    status = mixes ? projections(b, call) : kOk;
    if (!feeds) {
        status = first_of(status, b.moe ? kUnsupported : kOk);
    } else if (b.moe) {
        status = first_of(status, mixture(*b.moe, b, call.step.tokens));
    } else {
        status = first_of(status, matrix(b.mlp_in, b.gated ? 2 * b.ffn : b.ffn, b.hidden));
        status = first_of(status, matrix(b.mlp_out, b.hidden, b.ffn));
    }
    if (!(b.clip >= 0.0f) || b.causal < 0 || b.causal > 1 || (call.caches && !b.causal))
        return kUnsupported;
    for (const Norm* n : {&b.attn_norm, &b.attn_post_norm, &b.mlp_norm, &b.mlp_post_norm})
        status = first_of(status, norm(*n, b.hidden, b.hidden));
    if (b.qk_norm == kNoQkNorm && (b.q_norm.kind != kNoNorm || b.k_norm.kind != kNoNorm))
        return kUnsupported;
    status = first_of(status, norm(b.q_norm, q, b.qk_norm == kPerHead ? b.head_dim : q));
    status = first_of(status, norm(b.k_norm, kv, b.qk_norm == kPerHead ? b.head_dim : kv));
    if (b.multipliers && (b.post || b.parallel || b.residual_from_norm || b.moe))
        return kUnsupported;
    if (b.inputs)
        status = first_of(status, inputs(*b.inputs, b, call));
    status = first_of(status, first_of(streams(b, call), sparse(b, call)));
    for (const Scale* scale : {&b.attn_scale, &b.mlp_scale, &b.layer_scale})
        status = first_of(status, optional(scale->weight, scale->dtype));
    if (b.across)
        status = first_of(status, across(*b.across, b, call.step.sequences));
    return first_of(status, mask(b.mask));
}

// The tables of angles, which must have a row for the position of every token.
Status tables(const StackCall& call, int64_t more) {
    int64_t highest = call.step.tokens - 1, lowest = 0;
    if (call.positions && !is_aligned(call.positions, 8))
        return kAlignment;
    for (int64_t t = 0; call.positions && t < call.step.tokens; ++t) {
        highest = call.positions[t] > highest || t == 0 ? call.positions[t] : highest;
        lowest = call.positions[t] < lowest ? call.positions[t] : lowest;
    }
    for (int64_t i = 0; i < call.num_tables; ++i) {
        const Table& table = call.tables[i];
        if (!is_size(table.half) || !is_size(table.rows))
            return kShape;
        const Status status = first_of(tensor(table.cos, kFloat32), tensor(table.sin, kFloat32));
        if (status != kOk)
            return status;
        if (lowest < 0 || highest + more >= table.rows)
            return kRange;
    }
    return kOk;
}

Status layers(const StackCall& call, int64_t more = 0) {
    if (!is_size(call.num_blocks) || call.num_tables < 0 || call.num_tables >= kLargest)
        return kShape;
    if (!call.blocks || (call.num_tables && !call.tables) || (call.turn && !call.failed))
        return kNull;
    if (!is_aligned(call.failed, 4))
        return kAlignment;
    Status status = call.caches ? step(call.step, true, more) : packed_step(call.step);
    if (status == kOk)
        status = tables(call, more);
    for (int64_t i = 0; status == kOk && i < call.num_blocks; ++i) {
        const Block& b = call.blocks[i];
        const bool keeps = call.caches && b.branches != kOnlyFeed;
        if (keeps && b.recurrence)
            status = states(call.caches[i], call.step);
        if (keeps && (!b.recurrence || b.beside))
            status = first_of(status, cache(call.caches[i], call.cache_dtype, call.step));
        status = first_of(status, block(b, call));
    }
    return status == kOk ? distances(call, more) : status;
}

Status embeds(const ModelCall& call, const Frame& f) {
    const Status status = first_of(embedding(f.embed, f.embed.inputs), placeholders(f));
    if (status != kOk)
        return status;
    if (!call.token_ids || !call.positions)
        return kNull;
    if (!is_aligned(call.token_ids, 8) || !is_aligned(call.positions, 8))
        return kAlignment;
    if (f.pos_embed && (!is_size(f.pos_rows) || f.pos_offset < -kLargest || f.pos_offset > kLargest ||
                        f.pos_padding >= f.pos_rows))
        return kShape;
    if (f.embed_end < 0 || f.embed_end > f.embed.outputs)
        return kShape;
    const int64_t embeds = f.embed_end ? f.embed_end : f.embed.outputs;
    for (int64_t t = 0; t < call.stack.step.tokens; ++t) {
        const int64_t position = call.positions[t], last = position + call.steps - 1 + f.pos_offset;
        if (call.token_ids[t] < 0 || call.token_ids[t] >= embeds || position < 0 || position >= kLargest)
            return kRange;
        if (f.pos_embed && (position + f.pos_offset < 0 || last >= f.pos_rows))
            return kRange;
    }
    return first_of(optional(f.pos_embed, f.pos_dtype), optional(f.type_row, f.type_dtype));
}

// Several steps in one call require one token per sequence, and that every one of them is wanted.
Status steps(const ModelCall& call) {
    const Step& s = call.stack.step;
    if (!is_aligned(call.ends, 8) || !is_aligned(call.done, 8))
        return kAlignment;
    if (call.steps == 1)
        return kOk;
    if (!call.best || !call.done || (call.num_ends && !call.ends))
        return kNull;
    if (call.logits || call.num_ends < 0 || call.num_ends >= kLargest)
        return kUnsupported;
    if (s.tokens != s.sequences || call.rows != s.tokens || (call.stack.num_tables && !call.stack.positions))
        return kShape;
    for (int64_t r = 0; r < call.rows; ++r)
        if (s.query_starts[r] != r || call.logit_rows[r] != r)
            return kUnsupported;
    // The rotary positions of later steps are derived from the positions of the first one.
    for (int64_t r = 0; call.stack.positions && r < call.rows; ++r)
        if (call.stack.positions[r] != call.positions[r])
            return kUnsupported;
    return kOk;
}

// Everything of a model call except its layers, which are checked before.
Status around(const ModelCall& call) {
    if (!call.frame || !call.logit_rows || (!call.logits && !call.best))
        return kNull;
    const Frame& f = *call.frame;
    const int64_t hidden = call.stack.blocks[0].hidden;
    if (!is_size(call.rows) || !fits(call.rows, hidden) || !(f.softcap >= 0.0f))
        return kShape;
    Status status = embeds(call, f);
    status = status == kOk ? first_of(makes_inputs(call, f), splits(call, f)) : status;
    status = first_of(status, some_matrix(f.project_in, hidden, f.embed.inputs));
    status = first_of(status, some_matrix(f.project_out, f.project_out.outputs, hidden));
    status = first_of(
        status, exact_matrix(f.head, f.head.outputs, f.project_out.outputs ? f.project_out.outputs : hidden));
    status =
        first_of(status, first_of(norm(f.embed_norm, hidden, hidden), norm(f.final_norm, hidden, hidden)));
    const int64_t out = f.project_out.outputs;
    if (f.out_activation < -1 || (f.out_activation >= 0 && (!out || !is_activation(f.out_activation, 0))) ||
        (f.out_norm.kind != kNoNorm && !out))
        return kUnsupported;
    status = first_of(status, out ? norm(f.out_norm, out, out) : kOk);
    if (status != kOk || (!f.project_in.outputs && f.embed.inputs != hidden))
        return first_of(status, kShape);
    if (!fits(call.stack.step.tokens, f.embed.inputs) || !fits(call.rows, f.head.inputs) ||
        !fits(call.rows, f.head.outputs))
        return kShape;
    if (!is_aligned(call.logit_rows, 8) || !is_aligned(call.logits, 4) || !is_aligned(call.best, 8))
        return kAlignment;
    for (int64_t r = 0; r < call.rows; ++r)
        if (call.logit_rows[r] < 0 || call.logit_rows[r] >= call.stack.step.tokens)
            return kRange;
    if (call.draw) {
        if (!call.best || call.logits)
            return kUnsupported;
        status = draw(*call.draw, call.rows, f.head.outputs);
    }
    if (!is_aligned(call.entered, 4) || !is_aligned(call.looked, 8))
        return kAlignment;
    if (call.entered && (call.num_entered < 1 || call.num_entered > call.stack.step.tokens))
        return kShape;
    if (call.entered && call.num_entered > 1 &&
        (call.steps > 1 || f.project_out.outputs || call.stack.step.sequences > 1))
        return kUnsupported;
    if (status == kOk && call.screen)
        status = screen(call);
    status = first_of(status, suppressed(call.suppressed, call.num_suppressed, f.head.outputs));
    return first_of(status, steps(call));
}

Status lookup(const Lookup& l, int64_t tokens) {
    if (!l.table)
        return kOk;
    const Status status = tensor(l.table, l.dtype);
    if (status != kOk)
        return status;
    if (!is_size(l.rows) || !is_size(l.period))
        return kShape;
    if (!is_aligned(l.at, 8))
        return kAlignment;
    const int64_t used = l.period < tokens ? l.period : tokens;
    if (!l.at)
        return l.first >= 0 && l.first < kLargest && l.first + used <= l.rows ? kOk : kRange;
    for (int64_t t = 0; t < tokens; ++t)
        if (l.at[t] < 0 || l.at[t] >= l.rows)
            return kRange;
    return kOk;
}

// Everything of a text call except its layers, which are checked before.
Status around(const TextCall& call) {
    const Step& s = call.stack.step;
    const int64_t hidden = call.stack.blocks[0].hidden;
    if (!is_size(call.width) || (!call.project_in.outputs && call.width != hidden))
        return kShape;
    if (!fits(s.tokens, call.width) || !fits(s.sequences, hidden))
        return kShape;
    if (!call.lookups[0].table)
        return kNull;
    Status status = norm(call.norm, call.width, call.width);
    for (const Lookup& l : call.lookups)
        status = first_of(status, lookup(l, s.tokens));
    if (call.project_in.outputs)
        status = first_of(status, matrix(call.project_in, hidden, call.width));
    if (status != kOk || !call.pooler.outputs)
        return status;
    status =
        first_of(matrix(call.pooler, call.pooler.outputs, hidden), tensor(call.pooled, call.stack.dtype));
    if (!is_aligned(call.pooled_tokens, 8))
        return first_of(status, kAlignment);
    for (int64_t n = 0; status == kOk && n < s.sequences; ++n) {
        // A sequence without tokens has no first token.
        const int64_t t = call.pooled_tokens ? call.pooled_tokens[n] : s.query_starts[n];
        if (t < -1 || t >= s.tokens || (!call.pooled_tokens && s.query_starts[n + 1] == t))
            return kRange;
    }
    return status;
}

} // namespace

Status check(const LinearCall& call) {
    if (!is_size(call.rows))
        return kShape;
    const Status status = matrix(call.weight, call.weight.outputs, call.weight.inputs);
    if (status == kOk && !(fits(call.rows, call.weight.inputs) && fits(call.rows, call.weight.outputs)))
        return kShape;
    return first_of(status, first_of(tensor(call.x, call.dtype), tensor(call.out, call.dtype)));
}

Status check(const FeedCall& call) {
    const Matrix &first = call.first, &last = call.last;
    if (!is_size(call.rows) || !is_size(last.inputs))
        return kShape;
    if (call.gated < 0 || call.gated > 1 || call.gate_last < 0 || call.gate_last > call.gated)
        return kUnsupported;
    if (!is_activation(call.activation, call.gated))
        return kUnsupported;
    Status status = exact_matrix(first, call.gated ? 2 * last.inputs : last.inputs, first.inputs);
    status = first_of(status, exact_matrix(last, last.outputs, last.inputs));
    return first_of(status, first_of(tensor(call.x, call.dtype), tensor(call.out, call.dtype)));
}

Status check(const ExpertsCall& call) {
    if (!is_size(call.rows) || !is_size(call.hidden) || !is_size(call.ffn) || call.moe.shared ||
        call.moe.beside)
        return kShape;
    if (!is_activation(call.activation, call.gated) || !call.weights != !call.chosen)
        return kUnsupported;
    Status status = experts(call.moe, call.hidden, call.ffn, call.gated != 0, call.rows);
    if (status == kOk)
        status =
            call.weights
                ? chosen(call.weights, call.chosen, call.rows * call.moe.top_k, call.moe.experts)
                : first_of(choice(call.moe), exact_matrix(call.moe.router, call.moe.experts, call.hidden));
    return first_of(status, first_of(tensor(call.x, call.dtype), tensor(call.out, call.dtype)));
}

Status check(const DrawCall& call) {
    if (!call.out)
        return kNull;
    if (!is_aligned(call.out, 8))
        return kAlignment;
    const Status status = draw(call.draw, call.rows, call.vocabulary);
    return first_of(status, tensor(call.scores, call.dtype));
}

Status check(const NormCall& call) {
    if (!is_size(call.rows) || !is_size(call.width) || !fits(call.rows, call.width))
        return kShape;
    if (call.norm.kind == kNoNorm)
        return kUnsupported;
    const Status status = norm(call.norm, call.width, call.width);
    return first_of(status, first_of(tensor(call.x, call.dtype), tensor(call.out, call.dtype)));
}

Status check(const AttentionCall& call) {
    Status status = heads(call.heads, call.kv_heads, call.head_dim);
    const bool sizes = is_size(call.batch) && is_size(call.queries) && is_size(call.keys);
    if (!sizes || !is_size(call.batch * call.queries) || !is_size(call.batch * call.keys))
        return kShape;
    if (call.causal != 0 && call.causal != 1)
        return kUnsupported;
    for (const Strided* t : {&call.q, &call.k, &call.v}) {
        status = first_of(status, tensor(t->data, call.dtype));
        status = first_of(status, strides({t->batch, t->row, t->head}));
    }
    status = first_of(status, tensor(call.out, call.dtype));
    if (call.bias.data) {
        if (call.bias.dtype != kBoolean)
            status = first_of(status, tensor(call.bias.data, call.bias.dtype));
        status = first_of(status, strides({call.bias.batch, call.bias.row, call.bias.head}));
    }
    return first_of(status, absolute_mask(call.mask));
}

Status check(const PagedAttentionCall& call) {
    Status status = heads(call.heads, call.kv_heads, call.head_dim);
    status = first_of(status, first_of(tensor(call.q, call.dtype), tensor(call.out, call.dtype)));
    status = first_of(status, cache(call.cache, call.cache_dtype, call.step));
    status = first_of(status, absolute_mask(call.mask));
    return first_of(status, step(call.step, false));
}

Status check(const StackCall& call) {
    const Status status = first_of(layers(call), first_of(given_inputs(call), places(call)));
    return first_of(status, first_of(tensor(call.x, call.dtype), tensor(call.out, call.dtype)));
}

Status check(const TextCall& call) {
    if (call.stack.caches || call.stack.inputs || width_of_inputs(call.stack))
        return kUnsupported;
    const Status status =
        first_of(first_of(layers(call.stack), places(call.stack)), tensor(call.stack.out, call.stack.dtype));
    return status != kOk ? status : around(call);
}

Status check(const ModelCall& call) {
    if (!is_size(call.steps))
        return kShape;
    if (!call.stack.caches)
        return kNull;
    const Status status = layers(call.stack, call.steps - 1);
    return status != kOk ? status : around(call);
}

Status check(const SketchCall& call) {
    return sketch(call);
}

Status check(const PackCall& call) {
    const Matrix& m = call.packed;
    if (m.format == kPlain || m.bias || call.stride < m.inputs || call.stride >= kLargest)
        return m.format == kPlain || m.bias ? kUnsupported : kShape;
    return first_of(matrix(m, m.outputs, m.inputs), tensor(call.dense, call.dtype));
}

} // namespace slipstream
