// One transformer block; part of abi.h.
#pragma once

#include "abi_types.h"

namespace slipstream {

// What decides, besides causality, which keys a query attends to and with which scores.
struct Mask {
    const float* alibi;   // `(H,)` slopes, times (key position - query position), or null
    const void* sinks;    // `(H,)` logits that take part in the softmax without a value, or null
    float scale, softcap; // softcap 0: none
    // 0: none; causal: number of tokens seen, including the query's own; otherwise window / 2 on either side
    int32_t window;
    int32_t sinks_dtype;
    // `(H, reach)` or null: bias by the distance between query and key (query position - key position)
    const float* relative;
    int64_t reach; // columns of `relative`; no two tokens of a sequence may be farther apart
    int64_t zero;  // the column of distance 0; those before it are for keys after the query
    int64_t chunk; // 0: none; otherwise a causal query sees no key of an earlier chunk of so many positions
};

// Over what queries and keys are normalized: each head, with a weight `(D,)` for all or `(H * D,)`; or all
// heads of a token together.
enum QkNorm : int32_t { kNoQkNorm = 0, kPerHead = 1, kWhole = 2 };

// Own projections of keys and of values; values that are the keys before their norm and rotation; keys and
// values of an earlier block: the cache is that block's, and is only read.
enum KeysValues : int32_t { kOwnValues = 0, kKeysAsValues = 1, kBorrowed = 2, kKeysValues = 3 };

enum Gate : int32_t { kNoGate = 0, kSigmoidGate = 1, kSoftplusGate = 2, kGates = 3 };

enum Scoring : int32_t {
    kSoftmaxTopk = 0,
    kTopkSoftmax = 1,
    kSparsemixer = 2,
    kSigmoidTopk = 3,
    kTopkSigmoid = 4,
    kScorings = 5
};

// A mixture of experts, as in the Python docstring of `MoE`. A matrix with 0 outputs is absent.
struct Moe {
    // One per expert: `(F, C)`, or `(2 * F, C)` with gate above up where the block is `gated`, and `(C, F)`.
    const Matrix *experts_in, *experts_out;
    int64_t experts, top_k, shared; // shared: width of the shared experts, which process every token; 0: none
    // Experts are chosen from the best `top_groups` of `groups` groups of equal size, whose score is that of
    // their best expert or, with `sums_two`, the sum of their best two.
    int64_t groups, top_groups;
    const void* choice;       // `(experts,)`, added to the scores only to choose the experts, or null
    const void* expert_scale; // `(experts,)`, multiplies the weights last of all, or null
    float jitter;             // threshold of kSparsemixer
    // The weights are divided by max(their sum + more_sum, least_sum) if `normalize` is set, and multiplied
    // by `factor`; not with kTopkSoftmax and kSparsemixer.
    float more_sum, least_sum, factor;
    float router_scale; // with `beside`, of the normalized input of the router
    int32_t scoring, normalize, sums_two, choice_dtype, expert_scale_dtype;
    int32_t weighs_input; // 1: weights multiply the inputs of the experts, not their outputs
    // 1: router and routed experts read the residual stream, through `router_norm` and `entry_norm`; the
    // feed-forward's output is shared_norm(shared experts) + norm(routed experts).
    int32_t beside;
    Norm router_norm, entry_norm, shared_norm, norm; // only with `beside`
    // `(experts, C)`; like those of an expert, with `shared` in place of F; `(1, C)`, whose sigmoid
    // multiplies the output of the shared experts.
    Matrix router, shared_in, shared_out, shared_gate;
};

// A factor per channel, `(C,)`; null: none.
struct Scale {
    const void* weight;
    int32_t dtype, unused;
};

// A block's cross-attention to an encoder's states (M per sequence), between its self-attention and its
// feed-forward.
struct Across {
    // Of the branch's input (of the residual sum where the block is `post`), and of its output.
    Norm norm, post_norm;
    Matrix q, out;       // `(H * D, C)` and `(C, H * D)`
    const void *k, *v;   // `(N, K, M, D)` contiguous: keys and values of each sequence's states
    const int32_t* seen; // `(N,)`: a sequence attends to its first seen[n] states, 1 to M; null: to all
    int64_t states;      // M
    Mask mask;           // only scale and softcap
    int32_t dtype, unused;
};

// Latent attention: keys and values of all heads are projections of one latent per token, and the keys share
// a rotated part; H heads of P unrotated dims, then r rotated ones (D = P + r), and of V dims of values
// (V <= D). Shapes: R width of the latent, Q of that of the queries.
struct Latent {
    // One per head: `(R, P)`, transposed, and `(V, R)`. `up` has the rows of both: `(H * (P + V), R)`.
    const Matrix *keys, *values;
    int64_t rank, plain, rotated, value; // R, P, r, V
    float query_scale, latent_scale;     // of the queries, and of the latent after its norm
    // 1: before the rotation, the elements of each pair are adjacent; they are put apart, as the cache keeps
    // them (up to 512 rotated dims, an even number)
    int32_t apart, unused;
    Norm query_norm, norm;
    Matrix query_down, down, up; // `(Q, C)`, or with 0 outputs if the queries have no latent; `(R + r, C)`
};

// One of the inputs of a recurrence, by key head: those of head h are `scale` times the outputs [start + h *
// step, ...) of a projection. What is convolved has channels [channel + h * size, ...) for heads of `size`
// outputs.
struct Part {
    int64_t matrix, start, step, channel;
    float scale;
    int32_t unused;
};

enum Rule : int32_t { kNoRule = 0, kDeltaRule = 1, kStateSpace = 2, kSelective = 3, kRules = 4 };

// A mixer whose state per sequence has a fixed size; recurrence.h has the formulas. It replaces attention, or
// with `Block::beside` reads the same input, and both outputs are added.
// With kSelective (selective.h) only v is convolved, with silu; there is one head of key_dim = N and
// value_dim = channels, and q, k, rate, decay and the norm of the output are not read.
// Without a rule the output is gate * convolution(q * v), each `channels` wide. With a rule, q, k and v are
// convolved, with silu; key heads have key_dim outputs of q and k each, and value_heads / key_heads times
// value_dim outputs of v and of the gate, and as many rates and decays as they have value heads.
struct Recurrence {
    const Matrix* projections;        // of the block's input
    int64_t num_projections;          // up to 6
    const void *kernel, *kernel_bias; // `(channels, width)` contiguous; `(channels,)` or null
    int64_t channels, width;          // width: tokens that the convolution covers, 2 to 8
    int64_t key_heads, value_heads, key_dim, value_dim; // 0 without a rule
    Part q, k, v, gate, rate, decay;                    // without a rule: q, v and gate, with one head
    Matrix out;                                         // of the mixer's output
    // `(value_heads,)` each. The decay is exp(-exp(speed) * step), step = softplus(decay + shift). The rate
    // is rate_scale * sigmoid(rate), or with kStateSpace the step, which is at least `least_step` unless its
    // token continues a sequence alone (transformers bounds the steps of prompts only).
    const void *speed, *shift;
    const void* skip; // `(value_heads,)` or null: skip * v is added to a head's output
    // kSelective: of the convolved values, `(R + 2 * N, channels)`, whose outputs are the steps' inputs, keys
    // and queries; `(channels, R)`; their norms. `speed` is `(channels, N)`, `skip` `(channels,)`, `shift`
    // null
    Matrix mixed, steps;
    Norm step_norm, key_norm, query_norm;
    // Of each `norm_width` adjacent outputs; before or after they are multiplied with silu(gate).
    Norm norm;
    int64_t norm_width; // 0 without a norm; the weight has as many numbers, or one per output
    float least_step, rate_scale;
    int32_t rule, gate_first;
    int32_t kernel_dtype, bias_dtype, speed_dtype, shift_dtype, skip_dtype, unused;
};

// Constants, by what they multiply: the input of attention and mixer, after its norm; the projected keys;
// the outputs of attention and mixer; input, after its norm, and output of the feed-forward.
struct Multipliers {
    float attention_in, keys, attention_out, mixer_out, feed_in, feed_out;
};

// A third branch after the other two, whose gate is opened by an input of its own for each token:
// x + norm(out(f(gate(x)) * input)).
struct Inputs {
    int64_t width;    // P
    Matrix gate, out; // `(P, C)` and `(C, P)`
    Norm norm;
};

// Several streams of states per token, of which one runs through the block; the Python docstring of `Streams`
// has the formulas. Only in blocks with `inputs`, and in all blocks of a call or none.
struct Streams {
    int64_t count, active, rank;     // S, from 2 to 8; a; R
    Norm router_norm, narrow_norm;   // of the routers' input, and of the narrow branch
    Matrix router, predict, correct; // `(S, C)`, `(S * S, S)`, `(S, S)`, dense in rows
    Matrix narrow_in, narrow_out;    // of the narrow branch: `(R, C)` and `(C, R)`
    Scale scale;                     // of what the branch of the block's own input reads, or none
};

// The branches of a block: both, or only its attention (or recurrence), or only its feed-forward. What
// belongs to the other one is then not read; with one branch, neither `post`, nor `parallel`, nor `across`.
enum Branches : int32_t { kBothBranches = 0, kOnlyAttention = 1, kOnlyFeed = 2, kBranches = 3 };

// One transformer block; the Python docstring of `Block` shows its residual stream.
struct Block {
    int64_t hidden, heads, kv_heads, head_dim, ffn; // C, H, K, D, F
    // post: norms apply to the residual sums, not to the branches' inputs; parallel: attention and
    // feed-forward read the same input; residual_from_norm: a branch is added to its normalized input; gated:
    // `mlp_in` has 2 * F outputs, gate above up.
    int32_t post, parallel, residual_from_norm, gated;
    int32_t activation, qk_norm, qk_norm_after_rope;
    int32_t table;            // index into `StackCall::tables`, -1: no rotary embedding
    int32_t rope_interleaved; // pairs of dims are (2 i, 2 i + 1); otherwise (i, half + i)
    float residual_scale;     // multiplies the output of attention and feed-forward
    float clip; // queries, keys and values are clipped to [-clip, clip] before rotation; 0: no clipping
    // Queries are multiplied by 1 + growth * log(1 + floor((position + growth_offset) / growth_period)) after
    // norm and rotation; growth 0: not, and the other two are not read
    float growth, growth_period, growth_offset;
    int32_t causal; // 0: a token also sees later ones; only without a cache
    // A `Gate` of the attention's output, whose inputs are the last rows of `qkv`: one per channel of the
    // query heads, or with `gates_heads` one per head.
    int32_t gate, gates_heads;
    int32_t branches;
    // Where keys and values come from (`KeysValues`); other than kOwnValues only with caches.
    int32_t keys_values;
    int32_t beside; // 1: the recurrence is beside attention, not in its place
    // sparse 1: of the gate's values (all, if not `gated`), what exceeds their mean by `cutoff` of their
    // standard deviations goes to the activation, less this bound, and zeros for the rest; without `moe`
    float cutoff;
    int32_t sparse;
    Mask mask;
    Scale attn_scale, mlp_scale; // of the output of attention and feed-forward
    Scale layer_scale;           // one number, `(1,)`, of the block's output
    Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
    Norm v_norm; // of each head's values, without a weight
    // `((H + 2 * K) * D + gate, C)`: q, k and v heads, gate; `(C, H * D)`. With kKeysAsValues there are no v
    // heads, with kBorrowed neither k nor v heads. With `latent`: `(H * D, Q)`, or of C inputs if the queries
    // have no latent, and `(C, H * V)`.
    Matrix qkv, attn_out;
    Matrix mlp_in, mlp_out; // not read where `moe` is set
    const Moe* moe;         // replaces the plain feed-forward, or null
    const Across* across;   // or null; not with `parallel`
    const Latent* latent; // or null; K = H then, without norms of heads, clipping, gate and biases of scores
    // or null: replaces attention, whose matrices are then not read, or is beside it. Only with caches,
    // without `post`, `parallel`, `across`, `latent`.
    const Recurrence* recurrence;
    const Multipliers* multipliers; // or null; without `post`, `parallel`, `residual_from_norm`, `moe`
    const Inputs* inputs;           // or null; only with both branches, in sequence and not `post`
    const Streams* streams;         // or null
};

} // namespace slipstream
