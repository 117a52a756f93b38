// The C interface of the library: plain structs, one status code per call, no exceptions, no torch.
//
// Shapes: T packed tokens, N sequences, C hidden, H heads, K kv heads, D head dim, F feed-forward width, P
// cache blocks, Z tokens per cache block. Tensors are row-major with unit stride in the last dimension unless
// said otherwise, and aligned to their element; the caller owns all memory, and only `x`/`out` and the caches
// are written.
#pragma once

#include <cstdint>

namespace slipstream {

// Raised with every change of this file; the loader refuses a library of another number.
constexpr int32_t kAbi = 22;

enum Dtype : int32_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kFloat16 = 2,
    kInt8Codes = 3, // keys and values in a cache, with a scale per token and kv head
    kBoolean = 4    // masks, one byte each
};

enum Status : int32_t {
    kOk = 0,
    kNoIsa = 1,      // the instruction set is unknown, or the processor lacks it
    kNull = 2,       // a tensor that must be there is absent
    kDtype = 3,      // unknown dtype
    kShape = 4,      // shapes do not fit each other
    kAlignment = 5,  // a tensor is not aligned to its element
    kRange = 6,      // an index (slot, block, start) points outside
    kMemory = 7,     // no memory for scratch
    kUnsupported = 8 // an option this version does not know
};

// Some rows of a matrix. `stride` elements lie between rows, or, where `transposed`, between the columns of
// inputs: element (o, i) is data[o * stride + i], transposed data[i * stride + o].
struct Run {
    const void* data;
    int64_t rows, stride;
    int32_t transposed, unused;
};

// How a matrix is stored: dense, or packed as the docstring of formats/<name>.py draws it.
enum Format : int32_t {
    kPlain = 0,
    kInt8 = 1,
    kInt4 = 2,          // with a minimum
    kInt4Symmetric = 3, // without
    kFp8 = 4,           // e4m3
    kFp6E2m3 = 5,
    kFp6E3m2 = 6,
    kBf13 = 7,
    kFormats = 8
};

// Planes of a packed matrix, by what they hold. Each is contiguous with the matrix's rows one after another.
enum Plane : int32_t {
    kCodes = 0,   // every format; of fp6 the lower four bits
    kScales = 1,  // int4, fp6: float16 per group
    kMinima = 2,  // int4 with a minimum: float16 per group
    kUpper = 3,   // fp6: the upper two bits of each code
    kFactors = 4, // every format: float32 per row
    kPlanes = 5
};

// `(outputs, inputs)`. Dense, its rows lie in one run or several (the model's own q, k and v), all of one
// dtype; packed, it has planes instead, and `dtype` is what it would be unpacked to.
struct Matrix {
    const Run* runs;  // dense only
    const void* bias; // `(outputs,)` or null
    int64_t num_runs, outputs, inputs;
    int32_t dtype, bias_dtype;
    int32_t format, group;        // inputs per group: int4 32, 64 or 128, fp6 and bf13 64, else 0
    int32_t input_bits;           // 0; 8: each row that it multiplies is rounded to 8 bits first (int8, int4)
    int32_t input_zero;           // 0, or 1: and that with a zero point
    const void* planes[kPlanes];  // packed only; null where the format has none
    int64_t plane_bytes[kPlanes]; // must be what format, group and shape say
};

enum NormKind : int32_t { kNoNorm = 0, kRms = 1, kLayer = 2 };

// A vector norm; kNoNorm passes its input on. `count` is the length of weight and of bias (each may be null).
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
    kSwigluOai = 12, // gated only
    kActivations = 13
};

// What decides, beside causality, which keys count and how much.
struct Mask {
    const float* alibi;   // `(H,)` slopes or null
    const void* sinks;    // `(H,)` or null
    float scale, softcap; // softcap 0: none
    int32_t window;       // 0: none; tokens seen, or half of it on either side where not causal
    int32_t sinks_dtype;
    const float*
        relative;  // `(H, reach)` or null: added to the score of a key so many tokens before its query
    int64_t reach; // more than any token has before it
};

enum QkNorm : int32_t { kNoQkNorm = 0, kPerHead = 1, kWhole = 2 };

enum Scoring : int32_t { kSoftmaxTopk = 0, kTopkSoftmax = 1, kSparsemixer = 2, kScorings = 3 };

// A mixture of experts, as the Python docstring of `MoE` has it. A matrix without outputs is absent.
struct Moe {
    const Matrix *experts_in, *experts_out; // one per expert
    int64_t experts, top_k, shared;         // shared: width of the experts that see every token, 0 for none
    float jitter;
    int32_t scoring, normalize, unused;
    Matrix router, shared_in, shared_out, shared_gate;
};

// A block's attention to the states of an encoder, between its own and its feed-forward.
struct Across {
    Norm norm, post_norm; // of what is asked, or where the block is `post` of the sum; of what is answered
    Matrix q, out;        // `(H * D, C)` and `(C, H * D)`
    const void *k, *v;    // `(N, K, M, D)` contiguous, of the states of each sequence
    const int32_t* seen;  // `(N,)`: states that a sequence sees, from the first; null: all
    int64_t states;       // M
    Mask mask;            // scale and softcap alone
    int32_t dtype, unused;
};

// One transformer block; the Python docstring of `Block` draws its residual stream.
struct Block {
    int64_t hidden, heads, kv_heads, head_dim, ffn;
    int32_t post, parallel, residual_from_norm, gated;
    int32_t activation, qk_norm, qk_norm_after_rope;
    int32_t table; // which of the tables of angles, -1 for none
    int32_t rope_interleaved;
    float residual_scale;
    float clip;     // of queries, keys and values after their norms; 0 for none
    int32_t causal; // 0: a token sees what follows it, too; only without a cache
    Mask mask;
    Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
    Matrix qkv, attn_out;
    Matrix mlp_in, mlp_out; // not read where there are experts
    const Moe* moe;         // or null
    const Across* across;   // or null; not of parallel branches
};

// What one step computes; see ops/step.py. Every slot, start and used block is checked before it is followed.
struct Step {
    int64_t tokens, sequences, table_width;
    int64_t cache_blocks, block_size; // P, Z
    const int32_t* query_starts;      // `(N + 1,)`
    const int32_t* kv_lens;           // `(N,)`; without caches the first tokens of a sequence are its keys
    const int32_t* block_table;       // `(N, table_width)`
    const int64_t* slots;             // `(T,)`
    int64_t past;                     // tokens per page that are copied from older caches first
    int32_t heads_first, unused;      // 1: caches are `(P, K, Z, D)`; not of codes
};

// Cosines and sines, `(rows, half)` float32 each, every angle once.
struct Table {
    const float *cos, *sin;
    int64_t rows, half;
};

struct LinearCall {
    const void* x; // `(rows, inputs)` contiguous
    void* out;     // `(rows, outputs)` contiguous, same dtype
    int64_t rows;
    int32_t dtype, unused;
    Matrix weight;
};

// out = `last` times f(gate) * up, where gate and up are the halves of what `first` answers, or f of all of
// it.
struct FeedCall {
    const void* x; // `(rows, first.inputs)` contiguous
    void* out;     // `(rows, last.outputs)` contiguous, same dtype
    int64_t rows;
    int32_t dtype, activation;
    int32_t gated, gate_last; // gate_last: up is the first half
    Matrix first, last;       // neither rounds its inputs to codes
};

// Keys and values of one layer, `(P, Z, K, D)` contiguous, or with heads first. Codes (kInt8Codes) stand for
// code * scale, with scales `(P, Z, K)` float32 contiguous; otherwise the scales are null. Where a step has
// a past, its keys and values are `(P, K, past, D)` contiguous, and become the first of each page.
struct Cache {
    void *k, *v;
    float *k_scales, *v_scales;
    const void *past_k, *past_v;
};

struct PagedAttentionCall {
    const void* q; // `(T, H, D)` contiguous
    void* out;     // same
    Cache cache;
    int64_t heads, kv_heads, head_dim;
    int32_t dtype, cache_dtype;
    Mask mask;
    Step step; // `slots` is not read
};

// `(batch, rows, heads, D)` in any order, by the elements between neighbours; D is contiguous.
struct Strided {
    const void* data;
    int64_t batch, row, head;
};

// What is added to scores, or kBoolean: zero hides a key. Element (n, h, i, j) is data[n * batch + h * head +
// i * row + j]; a stride of 0 says the same to all.
struct Bias {
    const void* data; // or null
    int64_t batch, head, row;
    int32_t dtype, unused;
};

// Attention over padded batches: queries `(B, S, H, D)`, keys and values `(B, L, K, D)`.
struct AttentionCall {
    Strided q, k, v;
    void* out; // `(B, S, H, D)` contiguous
    int64_t batch, queries, keys, heads, kv_heads, head_dim;
    int32_t dtype;
    int32_t causal; // query i sees keys up to i + L - S
    Mask mask;      // window and slopes count from query i's own place, i + L - S
    Bias bias;
};

struct StackCall {
    const void* x; // `(T, C)` contiguous
    void* out;     // `(T, C)`, may be x
    const Block* blocks;
    int64_t num_blocks;
    const Cache* caches; // one per block, updated; or null: tokens see those of their own sequence alone
    const Table* tables;
    int64_t num_tables;
    const int64_t* positions; // `(T,)`, the row of each token in the tables; null: token t has row t
    int32_t dtype, cache_dtype;
    Step step; // without caches the tokens, the sequences, their starts and kv_lens are read
    // Where matrices are there for a while only: called by one thread before each block, and again after it,
    // while the others wait; it sets `failed`, after which the rest is left out and nothing is written. Or
    // null.
    void (*turn)(int64_t block);
    const int32_t* failed;
};

// What a table holds of each token.
struct Lookup {
    const void* table; // `(rows, width)` contiguous, or null: nothing
    int64_t rows;
    const int64_t* at;     // `(T,)`, each token's row; null: token t has row first + t % period
    int64_t first, period; // period > 0
    int32_t dtype, unused;
};

// An encoder of text: the sum of what the tables hold, its norm and projection enter the blocks; of what
// leaves them, one row of each sequence is pooled. A matrix without outputs is absent.
struct TextCall {
    StackCall stack; // without caches; `x` is not read
    Lookup lookups[3];
    int64_t width; // of the tables
    Norm norm;
    Matrix project_in, pooler;
    const int64_t* pooled_tokens; // `(N,)`, -1: zeros; null: the first of each sequence
    void* pooled;                 // `(N, pooler.outputs)` contiguous, same dtype as `out`: tanh(pooler x)
};

struct NormCall {
    const void* x; // `(rows, width)` contiguous
    void* out;     // same, may be x
    int64_t rows, width;
    int32_t dtype, unused;
    Norm norm; // of rms or layer
};

struct PackCall {
    const void* dense; // `(outputs, inputs)`, `stride` elements between rows; finite
    int64_t stride;
    int32_t dtype, unused;
    Matrix packed; // its planes are written; no bias
};

} // namespace slipstream

#include "abi_model.h"

#define SLIPSTREAM_API __attribute__((visibility("default")))

extern "C" {
SLIPSTREAM_API int32_t slipstream_abi();
// Index of an instruction set for the calls below, or -1: unknown, not built, or not in this processor.
SLIPSTREAM_API int32_t slipstream_isa(const char* name);
SLIPSTREAM_API const char* slipstream_error(int32_t status);
// Announces a call: threads that are parked get up meanwhile, and wait for it a moment.
SLIPSTREAM_API void slipstream_rouse();
SLIPSTREAM_API int32_t slipstream_linear(int32_t isa, int32_t threads, const slipstream::LinearCall* call);
SLIPSTREAM_API int32_t slipstream_feed(int32_t isa, int32_t threads, const slipstream::FeedCall* call);
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
