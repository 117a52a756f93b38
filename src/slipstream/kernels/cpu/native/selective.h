// Selective state spaces (Mamba 1): each channel c has a state of N numbers, and a decay for each of them.
// With values x, steps d = softplus(steps) and keys B and queries C that all channels share:
//   S[n][c] = exp(-exp(speed[c][n]) d[c]) S[n][c] + d[c] x[c] B[n],   out[c] = sum over n of S[n][c] C[n]
// Steps, keys and queries are projections of the convolved values. Source: Gu and Dao 2023 (arXiv
// 2312.00752), algorithm 2; the norms are those of Jamba and Falcon Mamba.
#pragma once

namespace slipstream {
namespace {

// ln(1 + e^x).
inline Vec softplus(Vec x) {
    const Vec zero = Vec::set(0), e = exponential(zero - abs(x));
    const Vec s = e / (e + Vec::set(2.0f)), z = s * s; // ln(1 + e) = 2 artanh(s), s <= 1/3
    Vec p = Vec::set(2.0f / 15);
    for (const float factor : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
        p = fma(p, z, Vec::set(factor));
    return fma(p, s, max(zero, x)); // of NaN, the second operand is returned
}

class SelectiveScan {
public:
    void take(Scratch& scratch, const StackCall& call) {
        int64_t channels = 0, mixed = 0, rank = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            if (const Recurrence* r = call.blocks[i].recurrence; r && r->rule == kSelective) {
                channels = most(channels, r->channels);
                mixed = most(mixed, r->mixed.outputs);
                rank = most(rank, r->steps.inputs);
            }
        const int64_t tokens = call.step.tokens, rounded = Vec::kBf16Dot && tokens < kManyRows ? tokens : 0;
        values_ = scratch.part<float>(tokens * channels);
        steps_ = scratch.part<float>(tokens * channels);
        mixed_ = scratch.part<float>(tokens * mixed);
        low_ = scratch.part<float>(tokens * rank);
        rounded_values_ = scratch.part<Bf16>(rounded * channels);
        rounded_low_ = scratch.part<Bf16>(rounded * rank);
    }

    // The widest inputs of its products.
    static int64_t widest(const StackCall& call) {
        int64_t width = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            if (const Recurrence* r = call.blocks[i].recurrence; r && r->rule == kSelective)
                width = most(width, most(r->channels, r->steps.inputs));
        return width;
    }

    void run(const RecurrentWork& w, const ProductRoom& room, Team& team, int rank,
             const Following& next) const {
        const Recurrence& r = w.r;
        const int64_t tokens = w.call.step.tokens, low = r.steps.inputs, mixed = r.mixed.outputs;
        const bool rounds = rounds_rows(r.mixed, tokens), rounds_low = rounds_rows(r.steps, tokens);
        convolve_values(w, rounds, team);
        project(room, {values_, rounds ? rounded_values_ : nullptr, r.channels, tokens}, r.mixed, mixed_,
                team, rank);
        each_one(team, tokens, [&](int64_t t) {
            float* row = mixed_ + t * mixed;
            norm_row(row, low_ + t * low, low, r.step_norm);
            norm_row(row + low, row + low, r.key_dim, r.key_norm);
            norm_row(row + low + r.key_dim, row + low + r.key_dim, r.key_dim, r.query_norm);
            if (rounds_low)
                copy_row(low_ + t * low, rounded_low_ + t * low, low);
        });
        project(room, {low_, rounds_low ? rounded_low_ : nullptr, low, tokens}, r.steps, steps_, team, rank,
                next);
        const int64_t pieces = ceil_div(r.channels, kChannels);
        each(team, w.call.step.sequences * pieces, 1, [&](int64_t task, int64_t) {
            const int64_t from = task % pieces * kChannels;
            scan(w, w.sequence(task / pieces), from, least(kChannels, r.channels - from));
        });
    }

private:
    static constexpr int64_t kTallest = 256; // N

    void convolve_values(const RecurrentWork& w, bool rounds, Team& team) const {
        const Recurrence& r = w.r;
        const RecurrentWork::Column v = w.column(r.v, 0);
        const Vec scale = Vec::set(r.v.scale);
        const int64_t pieces = ceil_div(r.channels, kChannels);
        each(team, w.call.step.sequences * pieces, 1, [&](int64_t task, int64_t) {
            const RecurrentWork::Sequence s = w.sequence(task / pieces);
            const int64_t from = task % pieces * kChannels, to = least(from + kChannels, r.channels);
            with_rows<kWidestConvolution>(r.width, [&](auto width) {
                for (int64_t c = from; c < to; c += Vec::kWidth) {
                    const int64_t n = least(to - c, Vec::kWidth);
                    convolve<width.value>(
                        r, s, c, n, [&](int64_t t) { return Vec::load(v.row(t) + c, n) * scale; },
                        [&](int64_t t, Vec y) { activate(kSilu, y).store(values_ + t * r.channels + c, n); });
                }
            });
            for (int64_t t = s.begin; rounds && t < s.end; ++t)
                copy_row(values_ + t * r.channels + from, rounded_values_ + t * r.channels + from, to - from);
        });
    }

    // Takes the states of n adjacent channels through the tokens of a sequence.
    void scan(const RecurrentWork& w, const RecurrentWork::Sequence& s, int64_t from, int64_t n) const {
        const Recurrence& r = w.r;
        const int64_t tall = r.key_dim;
        alignas(64) float speeds[kTallest * kChannels], state[kTallest * kChannels];
        alignas(64) float skips[kChannels] = {}, some[kTallest];
        for (int64_t c = 0; c < n; ++c) {
            read_row(r.speed, r.speed_dtype, (from + c) * tall, some, tall);
            for (int64_t j = 0; j < tall; j += Vec::kWidth) {
                const int64_t count = least(tall - j, Vec::kWidth);
                (Vec::set(0) - exponential(Vec::load(some + j, count))).store(some + j, count);
            }
            for (int64_t j = 0; j < tall; ++j)
                speeds[j * kChannels + c] = some[j];
        }
        if (r.skip)
            read_row(r.skip, r.skip_dtype, from, skips, n);
        float* home = s.state + (r.width - 1) * r.channels + from;
        for (int64_t j = 0; j < tall; ++j)
            if (s.is_new)
                std::memset(state + j * kChannels, 0, static_cast<size_t>(n) * sizeof(float));
            else
                std::memcpy(state + j * kChannels, home + j * r.channels,
                            static_cast<size_t>(n) * sizeof(float));
        const RecurrentWork::Column gate = w.column(r.gate, 0);
        const Vec opens = Vec::set(r.gate.scale);
        for (int64_t t = s.begin; t < s.end; ++t) {
            const float* keys = mixed_ + t * r.mixed.outputs + r.steps.inputs;
            float* out = w.joined + t * r.channels + from;
            for (int64_t c = 0; c < n; c += Vec::kWidth) {
                const int64_t count = least(n - c, Vec::kWidth);
                const Vec step = softplus(Vec::load(steps_ + t * r.channels + from + c, count));
                const Vec value = Vec::load(values_ + t * r.channels + from + c, count),
                          change = step * value;
                Vec sum = value * Vec::load(skips + c, count);
                for (int64_t j = 0; j < tall; ++j) {
                    float* at = state + j * kChannels + c;
                    const Vec decay = exponential(step * Vec::load(speeds + j * kChannels + c));
                    const Vec kept = fma(decay, Vec::load(at), change * Vec::set(keys[j]));
                    kept.store(at);
                    sum = fma(kept, Vec::set(keys[tall + j]), sum);
                }
                const Vec opened = activate(kSilu, Vec::load(gate.row(t) + from + c, count) * opens);
                (sum * opened).store(out + c, count);
            }
            if (w.rounded_joined)
                copy_row(out, w.rounded_joined + t * r.channels + from, n);
        }
        for (int64_t j = 0; j < tall; ++j)
            std::memcpy(home + j * r.channels, state + j * kChannels, static_cast<size_t>(n) * sizeof(float));
    }

    float *values_ = nullptr, *steps_ = nullptr, *mixed_ = nullptr, *low_ = nullptr;
    Bf16 *rounded_values_ = nullptr, *rounded_low_ = nullptr;
};

} // namespace
} // namespace slipstream
