// What mixers with a state of fixed size have in common: their rows, sequences, states and convolutions.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kWidestConvolution = 8; // tokens
constexpr int64_t kChannels = 64;         // of a task that has no heads

inline int64_t width_of(const Recurrence& r) {
    int64_t width = 0;
    for (int64_t i = 0; i < r.num_projections; ++i)
        width += r.projections[i].outputs;
    return width;
}

// Numbers of a sequence's state.
inline int64_t state_size(const Recurrence& r) {
    return (r.width - 1) * r.channels + r.value_heads * r.key_dim * r.value_dim;
}

struct RecurrentWork {
    const StackCall& call;
    const Block& b;
    const Recurrence& r;
    float* states;
    float* joined;
    Bf16* rounded_joined;
    float* rows; // the outputs of the projections, one after the other

    // The outputs of a projection, row by row.
    float* begin_of(int64_t projection) const {
        float* at = rows;
        for (int64_t i = 0; i < projection; ++i)
            at += call.step.tokens * r.projections[i].outputs;
        return at;
    }

    // The part of one key head in the rows of all tokens.
    struct Column {
        float* at;
        int64_t stride;
        float* row(int64_t t) const { return at + t * stride; }
    };
    Column column(const Part& part, int64_t key_head) const {
        return {begin_of(part.matrix) + part.start + key_head * part.step,
                r.projections[part.matrix].outputs};
    }

    // The tokens of one sequence in this step, and its state.
    struct Sequence {
        int64_t begin, end;
        bool is_new;
        float* state;
    };
    Sequence sequence(int64_t n) const {
        const Step& s = call.step;
        const int64_t begin = s.query_starts[n], end = s.query_starts[n + 1];
        return {begin, end, s.kv_lens[n] == end - begin, states + s.states[n] * state_size(r)};
    }
};

// Convolves adjacent channels of one sequence, at most one vector of them, and updates the state. `in(t)`
// returns the input of token t, `out(t, y)` receives its output.
template <int kWidth, class In, class Out>
inline void convolve(const Recurrence& r, const RecurrentWork::Sequence& s, int64_t channel, int64_t n, In in,
                     Out out) {
    constexpr int kOlder = kWidth - 1;
    alignas(64) float some[kWidestConvolution * Vec::kWidth], tap[Vec::kWidth] = {};
    read_row(r.kernel, r.kernel_dtype, channel * kWidth, some, n * kWidth);
    Vec taps[kWidth], past[kWidth], bias = Vec::set(0);
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) {
        for (int64_t i = 0; i < n; ++i)
            tap[i] = some[i * kWidth + j];
        taps[j] = Vec::load(tap);
    }
    if (r.kernel_bias) {
        read_row(r.kernel_bias, r.bias_dtype, channel, tap, n);
        bias = Vec::load(tap);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kOlder; ++j)
        past[j] = s.is_new ? Vec::set(0) : Vec::load(s.state + j * r.channels + channel, n);
    for (int64_t t = s.begin; t < s.end; ++t) {
        past[kOlder] = in(t);
        Vec y = bias;
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
            y = fma(past[j], taps[j], y);
#pragma GCC unroll 8
        for (int j = 0; j < kOlder; ++j)
            past[j] = past[j + 1];
        out(t, y);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kOlder; ++j)
        past[j].store(s.state + j * r.channels + channel, n);
}

} // namespace
} // namespace slipstream
