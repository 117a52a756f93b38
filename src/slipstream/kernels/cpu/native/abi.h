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

#include "abi_block.h"

namespace slipstream {

// Incremented with every change of this interface; the loader refuses a library with another number.
constexpr int32_t kAbi = 31;

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
    // `(N,)` ascending: each sequence's row in the states of layers with a recurrence; null without such
    // layers
    const int32_t* states;
    int64_t num_states;
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
// copied to the start of each page. Of a layer with latent attention, k is `(P, Z, R + r)` contiguous, a
// latent and a rotated key per token, and v is the same pointer; not with int8 codes, nor where
// `Step::heads_first`. Of a layer with a recurrence, k is the states, float32 whatever `cache_dtype` is, and
// all else is null: `num_states` rows of the convolution's last inputs `(width - 1, channels)`, then the
// heads' states `(value_heads, key_dim, value_dim)`. A state is not read at the start of its sequence.
struct Cache {
    void *k, *v;
    float *k_scales, *v_scales;
    const void *past_k, *past_v;
    float* states; // `(num_states, S)`: of the block's recurrence; S is `state_size` in recurrent_work.h
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
    const int64_t* places;    // `(T,)`: positions within the sequences; only read by blocks with `growth`
    // `Block::inputs` of all tokens: those of block i begin at inputs + token * inputs_stride + i * P, with
    // the same P in all blocks that have them; null where none does
    const float* inputs;
    int64_t inputs_stride;
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
// For tests: run all calls as if other processes crowded the processors, see pool.h; -1 ends it.
SLIPSTREAM_API void slipstream_crowd(int32_t barrier);
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
