// Mixers with a state of fixed size per sequence: a causal convolution, alone or followed by a gated delta
// rule or a state space. With S the state of a head, `(key_dim, value_dim)`, its decay d and its rate b:
//   delta rule    S = d S + k (b (v - d S^T k))^T     Source: Yang et al. 2024 (arXiv 2412.06464), eq. 10
//   state space   S = d S + k (b v)^T                 Source: Dao and Gu 2024 (arXiv 2405.21060), eq. 2
//   both          out = S^T q
// The selective state space is in selective.h.
#pragma once

#include <cmath>

namespace slipstream {
namespace {

class Recurrent {
public:
    void take(Scratch& scratch, const StackCall& call, int threads) {
        int64_t width = 0, heads = 0, tall = 0;
        for (int64_t i = 0; i < call.num_blocks; ++i)
            if (const Recurrence* r = call.blocks[i].recurrence) {
                width = most(width, width_of(*r));
                heads = most(heads, r->value_heads);
                tall = most(tall, r->rule == kSelective ? 0 : r->key_dim);
            }
        rows_ = scratch.part<float>(call.step.tokens * width);
        rates_ = scratch.part<float>(call.step.tokens * heads);
        decays_ = scratch.part<float>(call.step.tokens * heads);
        panel_size_ = tall * kVectors * Vec::kWidth;
        panels_ = scratch.part<float>(panel_size_ * threads);
        selective_.take(scratch, call);
    }

    // Whether the rows that enter are rounded to bfloat16 in place for one of the projections.
    static bool rounds_entry(const Recurrence& r, int64_t tokens) {
        bool any = false;
        for (int64_t i = 0; i < r.num_projections; ++i)
            any = any || rounds_rows(r.projections[i], tokens);
        return any;
    }

    // Computes the mixer's output of the inputs `normed` and `rounded`, `(T, C)`, apart from the last
    // product. The second output is written where it is not null.
    void run(const StackCall& call, int64_t layer, const float* normed, const Bf16* rounded, float* joined,
             Bf16* rounded_joined, const ProductRoom& room, Team& team, int rank,
             const Following& next) const {
        const Block& b = call.blocks[layer];
        const Recurrence& r = *b.recurrence;
        const RecurrentWork w = {call, b, r, call.caches[layer].states, joined, rounded_joined, rows_};
        for (int64_t i = 0; i < r.num_projections; ++i) {
            const Matrix& m = r.projections[i];
            const Bf16* some = rounds_rows(m, call.step.tokens) ? rounded : nullptr;
            const bool last = i + 1 == r.num_projections && r.rule != kSelective;
            project(room, {normed, some, b.hidden, call.step.tokens}, m, w.begin_of(i), team, rank,
                    last ? next : Following());
        }
        if (r.rule == kNoRule)
            return gated_convolution(w, team);
        if (r.rule == kSelective)
            return selective_.run(w, room, team, rank, next);
        convolve_heads(w, team);
        each_one(team, call.step.tokens, [&](int64_t t) { prepare_heads(w, t); });
        run_rule(w, team, rank);
        each_one(team, call.step.tokens, [&](int64_t t) { leave(w, t); });
    }

private:
    static constexpr int kVectors = 4; // of a head's columns that a task updates together, at most
    static constexpr int64_t kPanelBytes = 16 << 10;
    static constexpr int64_t kFewestToCopy = 4; // tokens

    // out = gate * convolution(q * v), where `v` is the convolution's other input.
    void gated_convolution(const RecurrentWork& w, Team& team) const {
        const Recurrence& r = w.r;
        const RecurrentWork::Column q = w.column(r.q, 0), v = w.column(r.v, 0), gate = w.column(r.gate, 0);
        const Vec entry = Vec::set(r.q.scale * r.v.scale), leaves = Vec::set(r.gate.scale);
        const int64_t pieces = ceil_div(r.channels, kChannels);
        each(team, w.call.step.sequences * pieces, 1, [&](int64_t task, int64_t) {
            const RecurrentWork::Sequence s = w.sequence(task / pieces);
            const int64_t from = task % pieces * kChannels, to = least(from + kChannels, r.channels);
            with_rows<kWidestConvolution>(r.width, [&](auto width) {
                for (int64_t c = from; c < to; c += Vec::kWidth) {
                    const int64_t n = least(to - c, Vec::kWidth);
                    convolve<width.value>(
                        r, s, c, n,
                        [&](int64_t t) {
                            return Vec::load(q.row(t) + c, n) * Vec::load(v.row(t) + c, n) * entry;
                        },
                        [&](int64_t t, Vec y) {
                            (y * Vec::load(gate.row(t) + c, n) * leaves)
                                .store(w.joined + t * r.channels + c, n);
                        });
                }
            });
            for (int64_t t = s.begin; w.rounded_joined && t < s.end; ++t)
                copy_row(w.joined + t * r.channels + from, w.rounded_joined + t * r.channels + from,
                         to - from);
        });
    }

    // Convolves queries, keys and values in place, with silu.
    void convolve_heads(const RecurrentWork& w, Team& team) const {
        const Recurrence& r = w.r;
        const int64_t values = r.value_heads / r.key_heads * r.value_dim, tasks = 3 * r.key_heads;
        each(team, w.call.step.sequences * tasks, 1, [&](int64_t task, int64_t) {
            const RecurrentWork::Sequence s = w.sequence(task / tasks);
            const int64_t which = task % tasks / r.key_heads, h = task % r.key_heads;
            const Part& part = which == 0 ? r.v : which == 1 ? r.q : r.k;
            const int64_t size = which == 0 ? values : r.key_dim, channel = part.channel + h * size;
            const RecurrentWork::Column rows = w.column(part, h);
            const Vec scale = Vec::set(part.scale);
            with_rows<kWidestConvolution>(r.width, [&](auto width) {
                for (int64_t c = 0; c < size; c += Vec::kWidth) {
                    const int64_t n = least(size - c, Vec::kWidth);
                    convolve<width.value>(
                        r, s, channel + c, n,
                        [&](int64_t t) { return Vec::load(rows.row(t) + c, n) * scale; },
                        [&](int64_t t, Vec y) { activate(kSilu, y).store(rows.row(t) + c, n); });
                }
            });
        });
    }

    // Normalises a token's queries and keys where the rule is the delta rule, and computes the rates and
    // decays of its value heads.
    void prepare_heads(const RecurrentWork& w, int64_t t) const {
        const Recurrence& r = w.r;
        const int64_t each = r.value_heads / r.key_heads;
        const float least_step = r.least_step > 0.0f && !continues_alone(w, t) ? r.least_step : 0.0f;
        for (int64_t h = 0; h < r.key_heads; ++h) {
            if (r.rule == kDeltaRule) {
                normalise(w.column(r.q, h).row(t), r.key_dim,
                          1.0f / std::sqrt(static_cast<float>(r.key_dim)));
                normalise(w.column(r.k, h).row(t), r.key_dim, 1.0f);
            }
            const float *rate = w.column(r.rate, h).row(t), *decay = w.column(r.decay, h).row(t);
            for (int64_t i = 0; i < each; ++i) {
                const int64_t head = h * each + i;
                float speed, shift;
                read_row(r.speed, r.speed_dtype, head, &speed, 1);
                read_row(r.shift, r.shift_dtype, head, &shift, 1);
                const float x = decay[i] * r.decay.scale + shift;
                float step = (x > 0.0f ? x : 0.0f) + std::log1p(std::exp(-std::fabs(x))); // NaN stays NaN
                step = step < least_step ? least_step : step;
                decays_[t * r.value_heads + head] = std::exp(-std::exp(speed) * step);
                rates_[t * r.value_heads + head] =
                    r.rule == kStateSpace ? step : r.rate_scale / (1.0f + std::exp(-rate[i] * r.rate.scale));
            }
        }
    }

    // Whether a token is the only one of its sequence in this step, and not the sequence's first.
    static bool continues_alone(const RecurrentWork& w, int64_t t) {
        const Step& s = w.call.step;
        int64_t n = 0;
        while (s.query_starts[n + 1] <= t)
            ++n;
        return s.query_starts[n + 1] - s.query_starts[n] == 1 && s.kv_lens[n] > 1;
    }

    // x = x * factor / length of x.
    static void normalise(float* x, int64_t n, float factor) {
        const Vec scale = Vec::set(factor / std::sqrt(squares_of(x, 0.0f, n) + 1e-6f));
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            const int64_t count = least(n - j, Vec::kWidth);
            (Vec::load(x + j, count) * scale).store(x + j, count);
        }
    }

    void run_rule(const RecurrentWork& w, Team& team, int rank) const {
        const Recurrence& r = w.r;
        // Of many columns each key and query is loaded for more; those of a panel have to fit into L1.
        const bool few = 4 * kVectors * Vec::kWidth * r.key_dim > kPanelBytes;
        const int64_t columns = (few ? 2 : kVectors) * Vec::kWidth;
        const int64_t pieces = ceil_div(r.value_dim, columns), tasks = r.value_heads * pieces;
        float* panel = panels_ + panel_size_ * rank;
        each(team, w.call.step.sequences * tasks, 1, [&](int64_t task, int64_t) {
            const RecurrentWork::Sequence s = w.sequence(task / tasks);
            const int64_t head = task % tasks / pieces, from = task % pieces * columns;
            const int64_t to = least(from + columns, r.value_dim);
            if (to - from == columns && few)
                return advance<2>(w, s, {head, from, Vec::kWidth, panel}, std::true_type());
            if (to - from == columns)
                return advance<kVectors>(w, s, {head, from, Vec::kWidth, panel}, std::true_type());
            for (int64_t c = from; c < to; c += Vec::kWidth)
                if (to - c < Vec::kWidth)
                    advance<1>(w, s, {head, c, to - c, panel}, std::false_type());
                else
                    advance<1>(w, s, {head, c, Vec::kWidth, panel}, std::true_type());
        });
    }

    // Adjacent columns of a head's state.
    struct Columns {
        int64_t head, from, n; // n: numbers in each of their vectors
        float* panel;          // of the calling thread
    };

    // Takes columns of a head's state through the tokens of a sequence: V vectors of them, which are whole
    // where `Whole` is true. A pass over the state updates it, and multiplies it with the query and with the
    // key of the next token. For several tokens the columns are copied to the panel and back: in the state
    // their stride uses a part of L1 only. Measured with a prompt of 1024 tokens, states of 128 x 128 and
    // panels of two vectors, on a Zen 4: 13 times as fast as four vectors of columns in the state.
    template <int V, class Whole>
    void advance(const RecurrentWork& w, const RecurrentWork::Sequence& s, const Columns& columns,
                 Whole) const {
        const Recurrence& r = w.r;
        const int64_t head = columns.head, each = r.value_heads / r.key_heads, h = head / each;
        const RecurrentWork::Column q = w.column(r.q, h), k = w.column(r.k, h), v = w.column(r.v, h);
        const int64_t at = head % each * r.value_dim + columns.from, joined = r.value_heads * r.value_dim;
        float* home = s.state + (r.width - 1) * r.channels + head * r.key_dim * r.value_dim + columns.from;
        const bool copies = s.end - s.begin >= kFewestToCopy;
        float* state = copies ? columns.panel : home;
        const int64_t stride = copies ? V * Vec::kWidth : r.value_dim;
        const auto load = [&](const float* p) {
            return Whole::value ? Vec::load(p) : Vec::load(p, columns.n);
        };
        const auto store = [&](Vec x, float* p) { Whole::value ? x.store(p) : x.store(p, columns.n); };
        float skip = 0.0f;
        if (r.skip)
            read_row(r.skip, r.skip_dtype, head, &skip, 1);
        Vec known[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            known[j] = Vec::set(0);
        for (int64_t d = 0; d < r.key_dim && (s.is_new || copies || r.rule == kDeltaRule); ++d) {
            const Vec key = Vec::set(s.begin < s.end ? k.row(s.begin)[d] : 0.0f);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                const int64_t i = j * Vec::kWidth;
                const Vec old = s.is_new ? Vec::set(0) : load(home + d * r.value_dim + i);
                known[j] = fma(old, key, known[j]);
                if (s.is_new || copies)
                    store(old, state + d * stride + i);
            }
        }
        for (int64_t t = s.begin; t < s.end; ++t) {
            const Vec decay = Vec::set(decays_[t * r.value_heads + head]);
            const Vec rate = Vec::set(rates_[t * r.value_heads + head]), factor = Vec::set(skip);
            const float *query = q.row(t), *key = k.row(t), *next = k.row(t + 1 < s.end ? t + 1 : t);
            Vec change[V], out[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                const Vec value = load(v.row(t) + at + j * Vec::kWidth);
                change[j] = (r.rule == kDeltaRule ? value - decay * known[j] : value) * rate;
                out[j] = r.skip ? value * factor : Vec::set(0);
                known[j] = Vec::set(0);
            }
            for (int64_t d = 0; d < r.key_dim; ++d) {
                const Vec one = Vec::set(key[d]), wanted = Vec::set(query[d]), following = Vec::set(next[d]);
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) {
                    float* place = state + d * stride + j * Vec::kWidth;
                    const Vec kept = fma(change[j], one, load(place) * decay);
                    store(kept, place);
                    out[j] = fma(kept, wanted, out[j]);
                    known[j] = fma(kept, following, known[j]);
                }
            }
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j)
                store(out[j], w.joined + t * joined + head * r.value_dim + columns.from + j * Vec::kWidth);
        }
        for (int64_t d = 0; copies && d < r.key_dim; ++d)
            for (int j = 0; j < V; ++j)
                store(load(state + d * stride + j * Vec::kWidth), home + d * r.value_dim + j * Vec::kWidth);
    }

    // Norms and gates the heads' outputs of one token.
    void leave(const RecurrentWork& w, int64_t t) const {
        const Recurrence& r = w.r;
        const int64_t values = r.value_heads / r.key_heads * r.value_dim,
                      joined = r.value_heads * r.value_dim;
        float* row = w.joined + t * joined;
        const Vec scale = Vec::set(r.gate.scale);
        const auto open = [&] {
            for (int64_t h = 0; h < r.key_heads; ++h) {
                const float* gate = w.column(r.gate, h).row(t);
                for (int64_t j = 0; j < values; j += Vec::kWidth) {
                    const int64_t n = least(values - j, Vec::kWidth);
                    float* at = row + h * values + j;
                    (Vec::load(at, n) * activate(kSilu, Vec::load(gate + j, n) * scale)).store(at, n);
                }
            }
        };
        if (r.gate_first)
            open();
        for (int64_t j = 0; r.norm.kind != kNoNorm && j < joined; j += r.norm_width)
            norm_row(row + j, row + j, r.norm_width, r.norm, r.norm.count == r.norm_width ? 0 : j);
        if (!r.gate_first)
            open();
        if (w.rounded_joined)
            copy_row(row, w.rounded_joined + t * joined, joined);
    }

    float* rows_ = nullptr;                      // the outputs of the projections, one after the other
    float *rates_ = nullptr, *decays_ = nullptr; // `(T, value_heads)`
    float* panels_ = nullptr;                    // of each thread
    int64_t panel_size_ = 0;
    SelectiveScan selective_;
};

// Multiplies a row of the attention's output, or of the mixer's in its place, and adds that of a mixer
// beside.
inline void join_mixer(const Block& b, float* attended, const float* mixed) {
    const Multipliers* by = b.multipliers;
    if (by)
        multiply_row(attended, b.hidden, attends(b) ? by->attention_out : by->mixer_out);
    if (b.beside)
        add_row(attended, attended, mixed, b.hidden, by ? by->mixer_out : 1.0f, Scale{});
}

} // namespace
} // namespace slipstream
