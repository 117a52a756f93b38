// The C interface of whole models; part of abi.h.
#pragma once

namespace slipstream {

// What stands around the blocks of a causal language model. A matrix without outputs is absent; the rest is
// as in the Python docstring of `FrameSpec`.
struct Frame {
    const void* pos_embed; // `(pos_rows, C)` contiguous, or null
    int64_t pos_rows, pos_offset;
    int64_t pos_padding;                     // tokens of this id have the row of that index; negative: none
    float embed_scale, logit_scale, softcap; // softcap 0: none
    int32_t pos_dtype;
    int32_t pos_after_norm, unused; // 1: positions are added after `embed_norm`
    Norm embed_norm, final_norm;
    Matrix embed, project_in, project_out, head; // `embed` has a row per token id, and is not transposed
};

// Words of a Mersenne twister's state.
constexpr int64_t kTwisted = 624;

// How the state of torch's generator of CPUs begins, as `torch.Generator.get_state` gives it.
// Source: `CPUGeneratorImplStateLegacy` of torch's ATen/CPUGeneratorImpl.cpp.
struct Generator {
    uint64_t seed;
    int32_t left, seeded; // left: words until new ones are made, and 1
    uint64_t next;        // which of them comes next
    uint64_t state[kTwisted];
};

// How tokens are drawn; see ops/draw.py. Each row of a batch has noise of its own, whether it draws or not.
struct Draw {
    const float* numbers;  // `(4,)`: temperature, k, 1 - p or negative, floor
    const float* noise;    // `(steps, rows, V)`, or null: as the generator makes it
    Generator* generator;  // updated; not read where noise is given
    const int64_t* places; // `(R,)`, which of the batch's rows each one is; null: its own
    uint8_t* seen; // `(rows, V)`, not 0: tokens that are penalised, to which those chosen are added; or null
    int64_t rows;  // of the batch
    float penalty; // divides scores of tokens that were seen, multiplies those below 0
    int32_t best;  // not 0: not drawn but the first of the highest (or NaN); noise, generator and all but
                   // the temperature are not read
};

struct DrawCall {
    const void* scores; // `(rows, vocabulary)` contiguous
    int64_t* out;       // `(rows,)`; -1: NaN, infinity or nothing that may be drawn
    int64_t rows, vocabulary;
    int32_t dtype, unused;
    Draw draw;
};

// What bounds the scores of all tokens, so that the best one of a single row is found without reading the
// whole vocabulary projection; see kernels/cpu/sketch.py.
struct Screen {
    Matrix sketch; // `(V, C + K)`: the head's rows, and what these lack along each direction; its bias
    const float* directions; // `(K, C)` contiguous
    const float* weights;    // `(C,)`, of what a row has beside the directions
    const float* errors;     // `(V,)`, times the length of a row in these weights: how much the sketch is off
    int64_t num_directions;  // K
    float stretch, along; // of what a row has along the directions: as it enters the sketch, and its weight
    float norms;          // the longest row of the head and of the sketch, added up
    int32_t unused;
};

// Makes a sketch, and what bounds it, of some rows of a plain or packed matrix.
struct SketchCall {
    Matrix head;             // `(V, C)`, not transposed
    Matrix sketch;           // int4 `(V, C + K)`, whole groups of each; its planes are written
    const float* directions; // `(K, C)` contiguous
    const float* weights;    // `(C,)`
    float* errors;           // `(V,)`, infinity where a row holds NaN or infinity
    float* lengths;          // `(count,)`, of a row of the head and of the sketch, added up
    int64_t first, count;    // tokens
    float stretch, along;    // not 0
};

// From token ids to logits, or to the best token of each row alone, or one that is drawn. Several steps at
// once take one token per sequence, and its successor in the next: they write to a copy of what `stack.step`
// points to, and end early after a step in which some sequence's token is one of the ends, or none can be
// drawn.
struct ModelCall {
    StackCall stack; // `x`, `out` and `dtype` are not read
    const Frame* frame;
    const int64_t *token_ids, *positions; // `(T,)`
    const int64_t* logit_rows;            // `(R,)`, tokens
    float* logits;                        // `(R, V)` contiguous, or null; only of a single step
    int64_t* best;                        // `(R, steps)`, the first of the highest (or NaN) logits; or null
    const Draw* draw;                     // `best` is drawn, and -1 as in DrawCall; or null
    int64_t rows, steps;                  // R, and how many steps at most
    const int64_t* ends;                  // `(num_ends,)`
    int64_t num_ends;
    int64_t* done; // how many steps were run; may be null for a single one
    // Called by the thread that called when a step's tokens are in `best`, but not for the last of the call,
    // while other threads are at the next one. It may call this library. Not 0: none follows that. Or null.
    int32_t (*told)(int64_t step);
    const Screen* screen; // only of the best tokens of a single row; or null
    float* entered;       // `(steps, num_entered, C)`: what the head is multiplied with for the last tokens
                          // of the first sequence, if there is one alone; or null
    int64_t num_entered;  // more than 1 only of a single step, without a project_out
    int64_t* looked;      // `(steps,)`, rows of the head that each step has multiplied; with a screen
    const int64_t* suppressed; // `(num_suppressed,)`, rising: tokens not to be `best`, fewer than all
    int64_t num_suppressed;
};

} // namespace slipstream
