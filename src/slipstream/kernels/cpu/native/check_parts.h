// Building blocks of the checks: sizes, tensors, matrices, and structs that several calls share. Included by
// check.cpp alone.
#pragma once

#include <initializer_list>

#include "abi.h"

namespace slipstream {
namespace {

// Larger sizes are invalid, and products of them would overflow.
constexpr int64_t kLargest = int64_t{1} << 31;

bool is_size(int64_t n) {
    return n > 0 && n < kLargest;
}
bool is_dtype(int32_t dtype) {
    return dtype == kFloat32 || dtype == kBfloat16 || dtype == kFloat16;
}
// Whether rows * width numbers could fit into memory; scratch sizes are small multiples of this.
bool fits(int64_t rows, int64_t width) {
    constexpr int64_t kMost = int64_t{1} << 40;
    return rows <= kMost / width;
}
uintptr_t item_size(int32_t dtype) {
    return dtype == kFloat32 ? 4 : 2;
}
bool is_aligned(const void* p, uintptr_t size) {
    return reinterpret_cast<uintptr_t>(p) % size == 0;
}

Status first_of(Status a, Status b) {
    return a != kOk ? a : b;
}

// A required tensor.
Status tensor(const void* p, int32_t dtype) {
    if (!is_dtype(dtype))
        return kDtype;
    if (!p)
        return kNull;
    return is_aligned(p, item_size(dtype)) ? kOk : kAlignment;
}

Status optional(const void* p, int32_t dtype) {
    return p ? tensor(p, dtype) : kOk;
}

Status cache(const Cache& c, int32_t dtype, const Step& s) {
    if (dtype == kInt8Codes && s.heads_first)
        return kUnsupported;
    if (dtype == kInt8Codes) {
        if (!c.k || !c.v || !c.k_scales || !c.v_scales)
            return kNull;
        return is_aligned(c.k_scales, 4) && is_aligned(c.v_scales, 4) ? kOk : kAlignment;
    }
    if (c.k_scales || c.v_scales)
        return kUnsupported;
    const Status statuses[] = {tensor(c.k, dtype), tensor(c.v, dtype), s.past ? tensor(c.past_k, dtype) : kOk,
                               s.past ? tensor(c.past_v, dtype) : kOk};
    for (const Status status : statuses)
        if (status != kOk)
            return status;
    return kOk;
}

Status strides(std::initializer_list<int64_t> elements) {
    for (const int64_t n : elements)
        if (n < 0 || n >= kLargest)
            return kShape;
    return kOk;
}

// One plane of a packed matrix with `row_bytes` bytes per row; 0 means that the plane must be absent.
Status plane(const Matrix& m, Plane which, int64_t row_bytes, uintptr_t item) {
    const void* p = m.planes[which];
    if (m.plane_bytes[which] != m.outputs * row_bytes)
        return kShape;
    if (!row_bytes)
        return p ? kUnsupported : kOk;
    if (!p)
        return kNull;
    return is_aligned(p, item) ? kOk : kAlignment;
}

// Whether the rounding of the inputs is supported: sums of byte products must fit into 32 bits.
bool rounding(const Matrix& m) {
    constexpr int64_t kMostInputs = 1 << 16;
    if (m.input_bits == 0)
        return m.input_zero == 0;
    const bool known = m.input_bits == 8 && (m.input_zero == 0 || m.input_zero == 1);
    const bool codes = m.format == kInt8 || m.format == kInt4 || m.format == kInt4Symmetric;
    return known && codes && m.inputs <= kMostInputs;
}

Status packed(const Matrix& m) {
    const bool int4 = m.format == kInt4 || m.format == kInt4Symmetric;
    const bool fp6 = m.format == kFp6E2m3 || m.format == kFp6E3m2;
    const bool bf13 = m.format == kBf13;
    if (int4 ? m.group != 32 && m.group != 64 && m.group != 128 : m.group != (fp6 || bf13 ? 64 : 0))
        return kUnsupported;
    if (!is_dtype(m.dtype))
        return kDtype;
    if (m.runs || m.num_runs || !rounding(m))
        return kUnsupported;
    const int64_t group = m.group ? m.group : 1, padded = (m.inputs + group - 1) / group * group;
    const int64_t scales = m.group && !bf13 ? 2 * (padded / group) : 0;
    const Status statuses[] = {
        plane(m, kCodes, bf13 ? padded / 8 * 13 : (int4 || fp6 ? padded / 2 : padded), 1),
        plane(m, kScales, scales, 2),
        plane(m, kMinima, m.format == kInt4 ? scales : 0, 2),
        plane(m, kUpper, fp6 ? padded / 4 : 0, 1),
        plane(m, kFactors, 4, 4),
        optional(m.bias, m.bias_dtype),
    };
    for (const Status status : statuses)
        if (status != kOk)
            return status;
    return kOk;
}

Status matrix(const Matrix& m, int64_t outputs, int64_t inputs) {
    if (!is_size(m.outputs) || !is_size(m.inputs) || m.outputs != outputs || m.inputs != inputs)
        return kShape;
    if (m.format < kPlain || m.format >= kFormats)
        return kUnsupported;
    if (m.format != kPlain)
        return packed(m);
    if (!rounding(m))
        return kUnsupported;
    if (!is_size(m.num_runs))
        return kShape;
    if (!m.runs)
        return kNull;
    int64_t rows = 0;
    for (int64_t i = 0; i < m.num_runs; ++i) {
        if (rows >= outputs) // each run has a row at least: this one is surplus, and may be unreadable
            return kShape;
        const Run& run = m.runs[i];
        if (!is_size(run.rows) || run.stride < (run.transposed ? run.rows : inputs) || run.stride >= kLargest)
            return kShape;
        const Status status = tensor(run.data, m.dtype);
        if (status != kOk)
            return status;
        rows += run.rows;
    }
    return rows == outputs ? optional(m.bias, m.bias_dtype) : kShape;
}

// A matrix that does not round its inputs.
Status exact_matrix(const Matrix& m, int64_t outputs, int64_t inputs) {
    const Status status = matrix(m, outputs, inputs);
    return status == kOk && m.input_bits ? kUnsupported : status;
}

Status norm(const Norm& n, int64_t count, int64_t other_count) {
    if (n.kind == kNoNorm)
        return kOk;
    if (n.kind != kRms && n.kind != kLayer)
        return kUnsupported;
    if ((n.weight || n.bias) && n.count != count && n.count != other_count)
        return kShape;
    const Status status = optional(n.weight, n.weight_dtype);
    return status != kOk ? status : optional(n.bias, n.bias_dtype);
}

Status mask(const Mask& m) {
    if (m.chunk < 0 || m.chunk >= kLargest || (m.chunk && m.window))
        return kUnsupported;
    if (m.window < 0 || !(m.softcap >= 0.0f))
        return kUnsupported;
    if (m.alibi && !is_aligned(m.alibi, 4))
        return kAlignment;
    if (m.relative && (!is_size(m.reach) || m.zero < 0 || m.zero >= m.reach))
        return kShape;
    if (!is_aligned(m.relative, 4))
        return kAlignment;
    return optional(m.sinks, m.sinks_dtype);
}

// The mask of a call that supports no bias by distance.
Status absolute_mask(const Mask& m) {
    return m.relative ? kUnsupported : mask(m);
}

Status heads(int64_t heads, int64_t kv_heads, int64_t dim) {
    constexpr int64_t kWidest = 1 << 16; // head dim; the heads together are bounded like any tensor
    if (!is_size(heads) || !is_size(kv_heads) || !is_size(dim) || dim > kWidest)
        return kShape;
    return heads % kv_heads == 0 && is_size(heads * dim) ? kOk : kShape;
}

Status draw(const Draw& d, int64_t rows, int64_t vocabulary) {
    if (!d.numbers || (!d.noise && !d.generator && !d.best))
        return kNull;
    if (!is_aligned(d.numbers, 4) || !is_aligned(d.noise, 4) || !is_aligned(d.places, 8))
        return kAlignment;
    if (!is_size(d.rows) || !is_size(rows) || !is_size(vocabulary) || (!d.places && rows != d.rows))
        return kShape;
    if (!fits(rows, vocabulary))
        return kShape;
    for (int64_t r = 0; d.places && r < rows; ++r)
        if (d.places[r] < 0 || d.places[r] >= d.rows)
            return kRange;
    // A comparison with NaN is false.
    const bool warps = d.numbers[0] > 0.0f && d.numbers[1] >= 1.0f && d.numbers[2] <= 1.0f &&
                       d.numbers[3] >= 0.0f && d.numbers[3] <= 1.0f;
    if (!warps || (d.seen && !(d.penalty > 0.0f)))
        return kUnsupported;
    if (d.noise || d.best)
        return kOk;
    if (!is_aligned(d.generator, 8))
        return kAlignment;
    return d.generator->left >= 1 && d.generator->left <= kTwisted ? kOk : kRange;
}

// The arguments of `slipstream_sketch`.
Status sketch(const SketchCall& call) {
    const Matrix &head = call.head, &s = call.sketch;
    const Status status =
        first_of(exact_matrix(head, head.outputs, head.inputs), exact_matrix(s, head.outputs, s.inputs));
    if (status != kOk)
        return status;
    for (int64_t i = 0; i < head.num_runs; ++i)
        if (head.runs[i].transposed)
            return kUnsupported;
    if (s.format != kInt4 || head.bias || s.bias)
        return kUnsupported;
    if (s.inputs <= head.inputs || head.inputs % s.group || s.inputs % s.group || call.first < 0 ||
        call.count < 0 || call.first > head.outputs || call.count > head.outputs - call.first)
        return kShape;
    if (!call.directions || !call.weights || !call.errors || !call.lengths)
        return kNull;
    const bool whole = is_aligned(call.directions, 4) && is_aligned(call.weights, 4) &&
                       is_aligned(call.errors, 4) && is_aligned(call.lengths, 4);
    return whole ? kOk : kAlignment;
}

// The screen of a model call, which bounds the scores of a single row.
Status screen(const ModelCall& call) {
    const Screen& s = *call.screen;
    const Frame& f = *call.frame;
    if (!call.best || !call.looked || !s.errors || !s.weights || (s.num_directions && !s.directions))
        return kNull;
    if (call.logits || call.draw || call.rows != 1 || f.softcap != 0.0f || !(f.logit_scale > 0.0f))
        return kUnsupported;
    if (s.num_directions < 0 || s.num_directions >= kLargest)
        return kShape;
    if (!is_aligned(s.errors, 4) || !is_aligned(s.weights, 4) || !is_aligned(s.directions, 4))
        return kAlignment;
    return exact_matrix(s.sketch, f.head.outputs, f.head.inputs + s.num_directions);
}

bool is_activation(int32_t activation, int32_t gated) {
    return activation >= 0 && activation < kActivations && (activation != kSwigluOai || gated);
}

// A matrix that may be absent (0 outputs).
Status some_matrix(const Matrix& m, int64_t outputs, int64_t inputs) {
    return m.outputs == 0 ? kOk : exact_matrix(m, outputs, inputs);
}

// How experts are chosen, apart from the router's matrix.
Status choice(const Moe& moe) {
    if (moe.scoring < 0 || moe.scoring >= kScorings || (moe.scoring == kSparsemixer && moe.top_k != 2))
        return kUnsupported;
    if (moe.groups < 1 || moe.groups > moe.experts || moe.experts % moe.groups || moe.top_groups < 1)
        return kShape;
    if (moe.top_groups < moe.groups) {
        const int64_t size = moe.experts / moe.groups;
        if (moe.scoring != kSoftmaxTopk && moe.scoring != kSigmoidTopk)
            return kUnsupported;
        if (moe.top_k > moe.top_groups * size || (moe.sums_two && size < 2))
            return kShape;
    }
    return first_of(optional(moe.choice, moe.choice_dtype),
                    optional(moe.expert_scale, moe.expert_scale_dtype));
}

// A choice that was made elsewhere.
Status chosen(const float* weights, const int64_t* experts, int64_t count, int64_t limit) {
    if (!is_aligned(weights, 4) || !is_aligned(experts, 8))
        return kAlignment;
    for (int64_t i = 0; i < count; ++i)
        if (experts[i] < 0 || experts[i] >= limit)
            return kRange;
    return kOk;
}

// The routed experts, `hidden` to `ffn` and back.
Status experts(const Moe& moe, int64_t hidden, int64_t ffn, bool gated, int64_t tokens) {
    const int64_t inner = gated ? 2 : 1;
    if (!is_size(moe.experts) || !is_size(moe.top_k) || moe.top_k > moe.experts)
        return kShape;
    if (!fits(tokens, moe.experts) || !fits(tokens * moe.top_k, ffn) || !fits(tokens * moe.top_k, hidden))
        return kShape;
    if (!moe.experts_in || !moe.experts_out)
        return kNull;
    Status status = kOk;
    for (int64_t e = 0; status == kOk && e < moe.experts; ++e)
        status = first_of(exact_matrix(moe.experts_in[e], inner * ffn, hidden),
                          exact_matrix(moe.experts_out[e], hidden, ffn));
    return status;
}

Status mixture(const Moe& moe, const Block& b, int64_t tokens) {
    const int64_t inner = b.gated ? 2 : 1;
    Status status = experts(moe, b.hidden, b.ffn, b.gated != 0, tokens);
    if (status == kOk)
        status = first_of(choice(moe), exact_matrix(moe.router, moe.experts, b.hidden));
    if (moe.beside < 0 || moe.beside > 1 ||
        (moe.beside &&
         (!moe.shared || moe.shared_gate.outputs || b.post || b.parallel || b.residual_from_norm)))
        return kUnsupported;
    for (const Norm* n : {&moe.router_norm, &moe.entry_norm, &moe.shared_norm, &moe.norm})
        status = first_of(status, n->kind && !moe.beside ? kUnsupported : norm(*n, b.hidden, b.hidden));
    if (moe.shared == 0)
        return status != kOk || !moe.shared_gate.outputs ? status : kUnsupported;
    if (!is_size(moe.shared) || !fits(tokens, moe.shared))
        return kShape;
    status = first_of(status, matrix(moe.shared_in, inner * moe.shared, b.hidden));
    status = first_of(status, matrix(moe.shared_out, b.hidden, moe.shared));
    return first_of(status, some_matrix(moe.shared_gate, 1, b.hidden));
}

// A block's cross-attention to an encoder's states.
Status across(const Across& a, const Block& b, int64_t sequences) {
    const int64_t joined = b.heads * b.head_dim;
    Status status = first_of(exact_matrix(a.q, joined, b.hidden), exact_matrix(a.out, b.hidden, joined));
    status =
        first_of(status, first_of(norm(a.norm, b.hidden, b.hidden), norm(a.post_norm, b.hidden, b.hidden)));
    status = first_of(status, first_of(tensor(a.k, a.dtype), tensor(a.v, a.dtype)));
    status = first_of(status, mask(a.mask));
    if (status != kOk)
        return status;
    if (b.parallel || a.mask.alibi || a.mask.sinks || a.mask.relative || a.mask.window)
        return kUnsupported;
    if (!is_size(a.states) || !is_size(sequences * a.states) ||
        !is_size(sequences * a.states * (b.kv_heads * b.head_dim)))
        return kShape;
    if (!is_aligned(a.seen, 4))
        return kAlignment;
    for (int64_t n = 0; a.seen && n < sequences; ++n)
        if (a.seen[n] < 1 || a.seen[n] > a.states)
            return kRange;
    return kOk;
}

// No sequence may become longer than a table of biases by distance covers, in both directions where tokens
// see later ones. Without caches, fewer tokens of a sequence may be keys than queries.
Status distances(const StackCall& call, int64_t more) {
    const Step& s = call.step;
    for (int64_t i = 0; i < call.num_blocks; ++i)
        for (int64_t n = 0; call.blocks[i].mask.relative && n < s.sequences; ++n) {
            const Mask& mask = call.blocks[i].mask;
            const int64_t queries = s.query_starts[n + 1] - s.query_starts[n], keys = s.kv_lens[n] + more;
            if ((keys > queries ? keys : queries) > mask.reach - mask.zero)
                return kRange;
            if (!call.blocks[i].causal && keys > mask.zero + 1)
                return kRange;
        }
    return kOk;
}

// Suppressed tokens: valid, strictly ascending, and fewer than the vocabulary.
Status suppressed(const int64_t* ids, int64_t count, int64_t vocabulary) {
    if (count < 0 || count >= vocabulary)
        return kShape;
    if (count && !ids)
        return kNull;
    if (!is_aligned(ids, 8))
        return kAlignment;
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= vocabulary || (i && ids[i] <= ids[i - 1]))
            return kRange;
    return kOk;
}

} // namespace
} // namespace slipstream
