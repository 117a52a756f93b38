// The C interface of the library: plain structs, one status code per call, no exceptions, no torch.
//
// Shapes: T packed tokens, N sequences, C hidden, H heads, K kv heads, D head dim, F feed-forward width, P
// cache blocks, Z tokens per cache block. Tensors are row-major with unit stride in the last dimension and
// aligned to their element size, unless noted otherwise. Strides are counted in elements. Sizes are positive
// and less than 2^31, unless noted otherwise. Flags are 0 or 1.
//
// The caller owns all memory. A call writes only to `out`, to the caches, and to members documented as
// written or updated.
#pragma once

#include <cstdint>

namespace slipstream {

// Incremented with every change of this interface; the loader refuses a library with another number.
constexpr int32_t kAbi = 23;

enum Dtype : int32_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kFloat16 = 2,
    kInt8Codes = 3, // int8 keys and values in a cache, with a float32 scale per token and kv head
    kBoolean = 4    // masks, one byte per element
};

enum Status : int32_t {
    kOk = 0,
    kNoIsa = 1,      // the instruction set is unknown, or the processor lacks it
    kNull = 2,       // a required tensor is null
    kDtype = 3,      // unknown dtype
    kShape = 4,      // shapes do not match
    kAlignment = 5,  // a tensor is not aligned to its element size
    kRange = 6,      // an index (slot, block, start) is out of range
    kMemory = 7,     // scratch memory could not be allocated
    kUnsupported = 8 // an option that this version does not support
};

// A run of consecutive rows of a matrix. Element (o, i) is data[o * stride + i], or data[i * stride + o]
// where `transposed`: `stride` is the number of elements between rows, or between input columns.
struct Run {
    const void* data;
    int64_t rows, stride;
    int32_t transposed, unused;
};

// How a matrix is stored: dense, or packed as shown in the docstring of formats/<name>.py.
enum Format : int32_t {
    kPlain = 0,
    kInt8 = 1,
    kInt4 = 2,          // with a minimum per group
    kInt4Symmetric = 3, // without minima
    kFp8 = 4,           // e4m3
    kFp6E2m3 = 5,
    kFp6E3m2 = 6,
    kBf13 = 7,
    kFormats = 8
};

// Planes of a packed matrix, by content. Each plane is contiguous and holds the matrix's rows in order. A row
// takes the number of bytes given in parentheses, where `padded` is the inputs rounded up to whole groups.
enum Plane : int32_t {
    // every format (int8, fp8: inputs; int4, fp6: padded / 2; bf13: padded / 8 * 13); of fp6 the lower four
    // bits
    kCodes = 0,
    kScales = 1,  // int4, fp6: float16 per group, aligned to 2 bytes (2 * groups)
    kMinima = 2,  // int4 with a minimum: float16 per group, aligned to 2 bytes (2 * groups)
    kUpper = 3,   // fp6: the upper two bits of each code (padded / 4)
    kFactors = 4, // every format: float32 per row, aligned to 4 bytes (4)
    kPlanes = 5
};

// An `(outputs, inputs)` matrix. A dense matrix consists of one or more runs of rows (such as a model's
// separate q, k and v), all of one dtype. A packed matrix has planes instead, and `dtype` is the dtype that
// it would be unpacked to.
struct Matrix {
    const Run* runs;  // dense only: `num_runs` runs, whose rows add up to `outputs`
    const void* bias; // `(outputs,)` or null
    int64_t num_runs, outputs, inputs;
    int32_t dtype, bias_dtype;
    int32_t format, group; // inputs per group: int4 32, 64 or 128; fp6 and bf13 64; otherwise 0
    // 0, or 8: each input row is rounded to 8 bits first (int8 and int4, up to 65536 inputs)
    int32_t input_bits;
    int32_t input_zero;           // 0, or 1: that rounding has a zero point; requires input_bits 8
    const void* planes[kPlanes];  // packed only; null where the format lacks the plane
    int64_t plane_bytes[kPlanes]; // must match format, group and shape
};

enum NormKind : int32_t { kNoNorm = 0, kRms = 1, kLayer = 2 };

// A norm over a vector x, with the mean taken as 0 by kRms; kNoNorm passes its input through:
// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (weight + offset) + bias. `count` is the length of both
// weight and bias. Each may be null; without a weight, its factor is 1, whatever `offset` is.
struct Norm {
    const void *weight, *bias;
    int64_t count;
    float eps, offset;
    int32_t kind, weight_dtype, bias_dtype, unused;
};

enum Activation : int32_t {
    kGelu = 0,
    kGeluTanh = 1,
    kQuickGelu = 2,
    kSilu = 3,
    kRelu = 4,
    kRelu2 = 5,
    kRelu6 = 6,
    kLeakyRelu = 7,
    kMish = 8,
    kTanh = 9,
    kSigmoid = 10,
    kLinear = 11,
    kSwigluOai = 12, // gated feed-forwards only
    kActivations = 13
};

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
    int64_t reach; // columns of `relative`; no sequence may be longer
};

// Over what queries and keys are normalized: each head, with a weight `(D,)` for all or `(H * D,)`; or all
// heads of a token together.
enum QkNorm : int32_t { kNoQkNorm = 0, kPerHead = 1, kWhole = 2 };

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
    const void* choice; // `(experts,)`, added to the scores only to choose the experts, or null
    float jitter;       // threshold of kSparsemixer
    // The weights are divided by max(their sum + more_sum, least_sum) if `normalize` is set, and multiplied
    // by `factor`; not with kTopkSoftmax and kSparsemixer.
    float more_sum, least_sum, factor;
    int32_t scoring, normalize, sums_two, choice_dtype;
    int32_t weighs_input, unused; // 1: weights multiply the inputs of the experts, not their outputs
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
    float clip;     // queries, keys and values are clipped to [-clip, clip] before rotation; 0: no clipping
    int32_t causal; // 0: a token also sees later ones; only without a cache
    // A `Gate` of the attention's output, whose inputs are the last rows of `qkv`: one per channel of the
    // query heads, or with `gates_heads` one per head.
    int32_t gate, gates_heads;
    Mask mask;
    Scale attn_scale, mlp_scale; // of the output of attention and feed-forward
    Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
    Matrix qkv, attn_out;   // `((H + 2 * K) * D + gate, C)`: q, k and v heads, gate; `(C, H * D)`
    Matrix mlp_in, mlp_out; // not read where `moe` is set
    const Moe* moe;         // replaces the plain feed-forward, or null
    const Across* across;   // or null; not with `parallel`
};

// What one step computes; see ops/step.py. Every slot, start and used block is checked before it is used as
// an index.
struct Step {
    int64_t tokens, sequences, table_width;
    int64_t cache_blocks, block_size; // P, Z
    const int32_t* query_starts; // `(N + 1,)`: sequence n has tokens [query_starts[n], query_starts[n + 1])
    // `(N,)`: tokens per sequence after the step; without caches, how many of its first tokens are keys
    const int32_t* kv_lens;
    // `(N, table_width)`: blocks of each sequence in order; unused entries are not read
    const int32_t* block_table;
    const int64_t* slots; // `(T,)`: block * Z + offset, where a token's key and value are written
    int64_t past;         // tokens per page that are first copied from `Cache::past_k` and `past_v`; 0: none
    int32_t heads_first, unused; // 1: caches are `(P, K, Z, D)`; not with int8 codes
};

// Cosines and sines of rotary angles, `(rows, half)` float32 each; each angle is stored once. The first
// 2 * half dims of a head are rotated.
struct Table {
    const float *cos, *sin;
    int64_t rows, half;
};

// out = x . weight^T + bias.
struct LinearCall {
    const void* x; // `(rows, inputs)` contiguous
    void* out;     // `(rows, outputs)` contiguous, same dtype
    int64_t rows;
    int32_t dtype, unused;
    Matrix weight;
};

// out = last(f(gate) * up) where gated, gate and up being the halves of first(x); otherwise
// last(f(first(x))).
struct FeedCall {
    const void* x; // `(rows, first.inputs)` contiguous
    void* out;     // `(rows, last.outputs)` contiguous, same dtype
    int64_t rows;
    int32_t dtype, activation;
    int32_t gated, gate_last; // gate_last: the first half is up, the second one the gate
    Matrix first, last;       // neither may have input_bits
};

// The routed experts of a mixture alone: out = the sum over the chosen experts of weight * expert(x).
struct ExpertsCall {
    const void* x;         // `(rows, hidden)` contiguous
    void* out;             // `(rows, hidden)` contiguous, same dtype
    const float* weights;  // `(rows, top_k)`, or null: the router chooses
    const int64_t* chosen; // `(rows, top_k)`, with `weights`
    int64_t rows, hidden, ffn;
    int32_t dtype, activation;
    int32_t gated, unused;
    Moe moe; // `shared` 0; with `weights`, `router` and what belongs to it are not read
};

// Keys and values of one layer: `(P, Z, K, D)` contiguous, or `(P, K, Z, D)` where `Step::heads_first`. Codes
// (kInt8Codes) stand for code * scale, with scales `(P, Z, K)` float32 contiguous; with other dtypes the
// scales are null. Where `Step::past` is not 0, past keys and values are `(P, K, past, D)` contiguous and are
// copied to the start of each page.
struct Cache {
    void *k, *v;
    float *k_scales, *v_scales;
    const void *past_k, *past_v;
};

// Causal attention of packed queries to a paged cache.
struct PagedAttentionCall {
    const void* q; // `(T, H, D)` contiguous
    void* out;     // `(T, H, D)` contiguous, same dtype
    Cache cache;
    int64_t heads, kv_heads, head_dim;
    int32_t dtype, cache_dtype;
    Mask mask;
    Step step; // `slots` is not read; nothing is written to the cache
};

// A `(batch, rows, heads, D)` tensor with arbitrary strides, except that D is contiguous.
struct Strided {
    const void* data;
    int64_t batch, row, head;
};

// What is added to the scores, or a mask where `dtype` is kBoolean: zero hides a key. Element (n, h, i, j) is
// data[n * batch + h * head + i * row + j]; a stride of 0 broadcasts.
struct Bias {
    const void* data; // or null
    int64_t batch, head, row;
    int32_t dtype, unused;
};

// Attention over padded batches: queries `(B, S, H, D)`, keys and values `(B, L, K, D)`, all of one dtype.
struct AttentionCall {
    Strided q, k, v;
    void* out; // `(B, S, H, D)` contiguous
    int64_t batch, queries, keys, heads, kv_heads, head_dim;
    int32_t dtype;
    int32_t causal; // query i sees keys 0 to i + L - S
    Mask mask;      // window and slopes take i + L - S as the position of query i; no `relative`
    Bias bias;
};

// All blocks of a model, one after another.
struct StackCall {
    const void* x; // `(T, C)` contiguous
    void* out;     // `(T, C)` contiguous, same dtype; may be x
    const Block* blocks;
    int64_t num_blocks;
    const Cache* caches; // one per block, updated; null: tokens attend only to their own sequence
    const Table* tables;
    int64_t num_tables;
    const int64_t* positions; // `(T,)`: each token's row in the tables; null: token t has row t
    int32_t dtype, cache_dtype;
    Step step; // without caches only tokens, sequences, query_starts and kv_lens are read
    // For matrices that are available only temporarily; or null. Called by one thread before each block and
    // again after it, while the other threads wait. If it sets `failed`, the remaining blocks are skipped and
    // nothing is written to `out`.
    void (*turn)(int64_t block);
    const int32_t* failed;
};

// One table of embeddings to look up, and the row of each token.
struct Lookup {
    const void* table; // `(rows, width)` contiguous, or null: no table
    int64_t rows;
    const int64_t* at;     // `(T,)`: each token's row; null: token t has row first + t % period
    int64_t first, period; // period > 0
    int32_t dtype, unused;
};

// A text encoder: the sum of the looked-up embeddings, its norm and projection enter the blocks; one row of
// each sequence is then taken from the last block's output and pooled. A matrix with 0 outputs is absent.
struct TextCall {
    StackCall stack;   // without caches; `x` is not read
    Lookup lookups[3]; // the first one is required
    int64_t width;     // of the tables' rows
    Norm norm;
    Matrix project_in, pooler;
    const int64_t* pooled_tokens; // `(N,)`: the token to pool, -1: zeros; null: the first of each sequence
    void* pooled;                 // `(N, pooler.outputs)` contiguous, same dtype as `out`: tanh(pooler(x))
};

struct NormCall {
    const void* x; // `(rows, width)` contiguous
    void* out;     // `(rows, width)` contiguous, same dtype; may be x
    int64_t rows, width;
    int32_t dtype, unused;
    Norm norm; // kRms or kLayer
};

// Packs a dense matrix.
struct PackCall {
    const void* dense; // `(outputs, inputs)` with `stride` elements between rows; finite
    int64_t stride;
    int32_t dtype, unused;
    Matrix packed; // its planes are written; no bias
};

} // namespace slipstream

#include "abi_model.h"

#define SLIPSTREAM_API __attribute__((visibility("default")))

extern "C" {
// Return `kAbi`, for the loader to compare.
SLIPSTREAM_API int32_t slipstream_abi();
// Return the index of an instruction set for the calls below, or -1 if it is unknown, not built, or not
// supported by this processor.
SLIPSTREAM_API int32_t slipstream_isa(const char* name);
// Return a static English description of a status.
SLIPSTREAM_API const char* slipstream_error(int32_t status);
// Announce a call: parked worker threads wake up and wait for it for a moment.
SLIPSTREAM_API void slipstream_rouse();
// Run a call on the instruction set with index `isa` (from `slipstream_isa`) and at most `threads` threads
// (at least one, at most as many as the process may use processors); return a `Status` once the call is
// complete. The arguments are checked before anything is read through them. Scratch memory is internal.
SLIPSTREAM_API int32_t slipstream_linear(int32_t isa, int32_t threads, const slipstream::LinearCall* call);
SLIPSTREAM_API int32_t slipstream_feed(int32_t isa, int32_t threads, const slipstream::FeedCall* call);
SLIPSTREAM_API int32_t slipstream_experts(int32_t isa, int32_t threads, const slipstream::ExpertsCall* call);
SLIPSTREAM_API int32_t slipstream_draw(int32_t isa, int32_t threads, const slipstream::DrawCall* call);
SLIPSTREAM_API int32_t slipstream_norm(int32_t isa, int32_t threads, const slipstream::NormCall* call);
SLIPSTREAM_API int32_t slipstream_attention(int32_t isa, int32_t threads,
                                            const slipstream::AttentionCall* call);
SLIPSTREAM_API int32_t slipstream_paged_attention(int32_t isa, int32_t threads,
                                                  const slipstream::PagedAttentionCall* call);
SLIPSTREAM_API int32_t slipstream_stack(int32_t isa, int32_t threads, const slipstream::StackCall* call);
SLIPSTREAM_API int32_t slipstream_text(int32_t isa, int32_t threads, const slipstream::TextCall* call);
SLIPSTREAM_API int32_t slipstream_pack(int32_t isa, int32_t threads, const slipstream::PackCall* call);
SLIPSTREAM_API int32_t slipstream_sketch(int32_t isa, int32_t threads, const slipstream::SketchCall* call);
SLIPSTREAM_API int32_t slipstream_model(int32_t isa, int32_t threads, const slipstream::ModelCall* call);
}
