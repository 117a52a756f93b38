// The C interface of whole models; part of abi.h.
#pragma once

namespace slipstream {

// What precedes and follows the blocks of a causal language model. A matrix with 0 outputs is absent; the
// rest is as in the Python docstring of `FrameSpec`.
struct Frame {
    const void* pos_embed; // `(pos_rows, C)` contiguous, or null; row: position + pos_offset
    int64_t pos_rows, pos_offset;
    int64_t pos_padding;         // tokens with this id use this row instead; negative: none
    const int64_t* placeholders; // `(num_placeholders,)`: tokens that are embedded as the token `stand_in`
    int64_t num_placeholders, stand_in;
    float embed_scale, logit_scale, softcap; // softcap 0: none
    int32_t pos_dtype;
    int32_t pos_after_norm; // 1: positions are added after `embed_norm`, not before
    // of inputs_embed's row, of what inputs_project makes of the token's embedding, and of their sum
    float inputs_embed_scale, inputs_project_scale, inputs_scale;
    Norm embed_norm, final_norm, inputs_norm;
    // `embed` has one row per token id, and its runs are not transposed
    Matrix embed, project_in, project_out, head;
    // The inputs of all blocks (`Block::inputs`), with L blocks of P: `(V, L * P)` like `embed`, and
    // `(L * P, C)`, whose outputs `inputs_norm` normalizes in pieces of P. Both or neither; the embedding
    // that is projected is the first block's input.
    Matrix inputs_embed, inputs_project;
    int64_t inputs_rows; // tokens with this id or a higher one read row 0 of inputs_embed; 0: none do
    // With blocks of S streams: S - 1 matrices `(C, C)` that make them of an embedding, and as many that
    // project them back; see the Python docstring of `FrameStreams`
    const Matrix *split, *join;
    int64_t others; // S - 1, or 0
    // Tokens with this id or a higher one are refused, and end a call of several steps: they have no row in
    // `embed`, whatever its size; 0: all rows are used
    int64_t embed_end;
    Norm out_norm;        // of the output of project_out, after its activation
    const void* type_row; // `(C,)`, added with the positions; or null
    int32_t type_dtype;
    int32_t out_activation; // -1: none
};

// Number of words in the state of a Mersenne Twister.
constexpr int64_t kTwisted = 624;

// The leading fields of the state of torch's CPU generator, as `torch.Generator.get_state` returns it.
// Source: `CPUGeneratorImplStateLegacy` of torch's ATen/CPUGeneratorImpl.cpp.
struct Generator {
    uint64_t seed;
    int32_t left, seeded; // left: words until the state is regenerated, plus 1
    uint64_t next;        // index of the next word in `state`
    uint64_t state[kTwisted];
};

// How tokens are sampled; see ops/draw.py. Every row of a batch consumes its own noise, whether or not it
// samples. Here `rows` is the size of the whole batch, R the number of rows that sample.
struct Draw {
    const float* numbers;  // `(4,)`: temperature > 0, top k >= 1, 1 - top p (negative: off), min p in [0, 1]
    const float* noise;    // `(steps, rows, V)` exponential noise; null: taken from `generator`
    Generator* generator;  // updated; not read where `noise` is given
    const int64_t* places; // `(R,)`: index of each row in the batch; null: the row's own index
    uint8_t* seen;         // `(rows, V)`, or null: nonzero for penalized tokens; chosen tokens are added
    int64_t rows;          // of the whole batch
    float penalty;         // divides positive scores of penalized tokens, multiplies negative ones
    // not 0: take the first highest score (or first NaN) instead of sampling; noise and generator are then
    // not read, and `numbers` are checked but have no effect
    int32_t best;
};

struct DrawCall {
    const void* scores; // `(rows, vocabulary)` contiguous
    // `(rows,)`: tokens; -1 where, in sampling, a score is NaN or +infinity, or all are -infinity
    int64_t* out;
    int64_t rows, vocabulary;
    int32_t dtype, unused;
    Draw draw;
};

// Bounds on the scores of all tokens, with which the best token of a single row is found without reading the
// whole vocabulary projection; see kernels/cpu/sketch.py. K is the number of directions.
struct Screen {
    // `(V, C + K)`: the approximated rows of the head, then what they lack along each direction; with the
    // head's bias
    Matrix sketch;
    const float* directions; // `(K, C)` contiguous
    // `(C,)`: weights of an input row's channels, after its part along the directions is removed
    const float* weights;
    // `(V,)`: the error of a score is at most this times the weighted length of the input row
    const float* errors;
    int64_t num_directions; // K
    // scale of the input's components along the directions in the sketch, and their weight in the length
    float stretch, along;
    float norms; // upper bound on the length of a head row plus that of its sketch
    int32_t unused;
};

// Makes the sketch of some rows of a plain or packed head, with the bounds on its errors.
struct SketchCall {
    Matrix head;             // `(V, C)`, not transposed, no bias
    Matrix sketch;           // int4 `(V, C + K)`, C and K multiples of the group; its planes are written
    const float* directions; // `(K, C)` contiguous
    const float* weights;    // `(C,)`, not 0
    float* errors;           // `(V,)`, written: infinity where a row holds NaN or infinity
    float* lengths;          // `(count,)`, written: length of a head row plus that of its sketch
    int64_t first, count;    // the tokens (rows of the head) [first, first + count)
    float stretch, along;    // not 0
};

// From token ids to logits, or to each row's best or sampled token. With several steps, every sequence has
// one token, whose successor is the input of the next step. Positions, slots and lengths advance in a copy of
// what `stack.step` points to. The call ends early after a step in which a sequence's token is one of `ends`,
// or no token could be drawn.
struct ModelCall {
    // `x`, `out`, `inputs` and `places` are not used; `dtype` only selects how attention multiplies with int8
    // caches
    StackCall stack;
    const Frame* frame;
    const int64_t *token_ids, *positions; // `(T,)`, positions from 0
    const int64_t* logit_rows;            // `(R,)`: indices of the tokens whose logits are computed
    float* logits;                        // `(R, V)` contiguous, written, or null; only with steps == 1
    int64_t* best;       // `(R, steps)`, written, or null: the first highest logit (or first NaN)
    const Draw* draw;    // or null: `best` is sampled instead; -1 as in `DrawCall`
    int64_t rows, steps; // rows: R; steps: maximum number of steps
    const int64_t* ends; // `(num_ends,)`
    int64_t num_ends;
    int64_t* done; // written: number of steps that were run; may be null with steps == 1
    // Called by the calling thread once the tokens of `step` are in `best`, except for the last step of the
    // call, while the other threads run the next step. It may call this library. A nonzero result makes the
    // step that is running the last one. May be null.
    int32_t (*told)(int64_t step);
    const Screen* screen; // or null; only with `best`, one row, and no `draw`
    // `(steps, num_entered, C)`, written, or null: the head's input of row 0, or, where num_entered > 1, of
    // the last num_entered tokens
    float* entered;
    int64_t num_entered; // more than 1 only with one step, one sequence and no project_out
    int64_t* looked;     // `(steps,)`, written with a screen: how many rows of the head each step multiplied
    const int64_t* suppressed; // `(num_suppressed,)`, ascending: tokens that `best` must not be, fewer than V
    int64_t num_suppressed;
};

} // namespace slipstream
