// The best token of a single row, from a part of the vocabulary projection. A sketch of the projection in
// fewer bits gives every score within an error bound; the scores that may be the best are then computed from
// the projection itself, with the same result as if all had been computed. The sketch is that packed matrix,
// a screen is a sketch with its bounds, a Screening is one generation's use of a screen.
//
// A row x is the sum of a part along some directions, those along which the model's rows mostly lie, and a
// rest r. Of a token's weights w the sketch holds s and, for each direction, the part of w - s along it, so
// that
//     x . w = x . s + along . lacking + error,    |error| <= |(r * weights, along)| * errors[token]
// by Cauchy-Schwarz. See kernels/cpu/sketch.py for the definition of errors.
#pragma once

namespace slipstream {
namespace {

class Screening {
public:
    Screening(const Screen& screen, const Matrix& head, float scale, const Suppressed& suppressed,
              Scratch& scratch, int threads)
        : screen_(screen), suppressed_(suppressed), inputs_(head.inputs), outputs_(head.outputs),
          scale_(scale) {
        const int64_t wide = screen.sketch.inputs;
        upper_ = scratch.part<float>(outputs_);
        looked_ = scratch.part<int64_t>(threads);
        known_ = scratch.part<Best>(threads);
        rows_ = scratch.part<float>(2 * wide * threads);
        operand_size_ = operand_bytes(wide, 1);
        operands_ = scratch.part<char>(operand_size_ * threads);
    }

    // Calls `compute(begin, end)` for the tokens that may be the best one; it updates `best` with the best
    // token that it computes. All threads of the team must call this.
    template <class F>
    void run(const Operand& x, Team& team, int rank, const Best& best, F compute) {
        const Seen seen = see(x, rank);
        const Matrix& sketch = screen_.sketch;
        Best top = {0.0f, -1};
        for (int64_t begin, end;
             team.take_run(rank, outputs_, grain(sketch, outputs_, team.size()), &begin, &end);)
            bound(seen, begin, end, top);
        each_own(team, rank, [&](int one) {
            looked_[one] = 0;
            known_[one] = {0.0f, -1};
        });
        // A lower bound of the best score: the exact score of the token that seems to be the best.
        if (top.index >= 0)
            look(top.index / kTogether, top.index / kTogether + 1, rank, compute);
        known_[rank] = best;
        team.meet();
        Best known = {0.0f, -1};
        for (int i = 0; i < team.size(); ++i)
            known = is_better(known_[i], known) ? known_[i] : known;
        const float least_score = known.value;
        each_in_runs(team, rank, ceil_div(outputs_, kTogether), kScanned, [&](int64_t begin, int64_t end) {
            for (int64_t first = begin, g = begin; g <= end; ++g) {
                const bool may = g < end && may_be(g, least_score);
                if (!may || (g - first + 1) * kTogether > kMostColumns) {
                    if (g > first)
                        look(first, g, rank, compute);
                    first = may ? g : g + 1;
                }
            }
        });
    }

    // The number of rows of the projection that were multiplied.
    int64_t looked(int threads) const {
        int64_t all = 0;
        for (int i = 0; i < threads; ++i)
            all += looked_[i];
        return all;
    }

private:
    // Tokens whose scores are computed together, so that they equal those of the full product to the last
    // bit.
    static constexpr int64_t kTogether = 16, kScanned = 64;

    struct Seen {
        Operand row;
        float length, slack;
    };

    // Prepares the left side for the sketch, and bounds how far off a score may be.
    Seen see(const Operand& x, int rank) {
        const int64_t count = screen_.num_directions, wide = screen_.sketch.inputs;
        float *row = rows_ + 2 * wide * rank, *rest = row + wide;
        std::memcpy(row, x.rows.full, static_cast<size_t>(inputs_) * sizeof(float));
#ifdef SLIPSTREAM_BF16_DOT
        if (x.terms && operand_terms(screen_.sketch) == 1) // rounded as for the projection
            for (int64_t j = 0; j < inputs_; j += Vec::kWidth) {
                const int64_t n = least(inputs_ - j, Vec::kWidth);
                alignas(64) Bf16 part[Vec::kWidth];
                Vec::load(row + j, n).store(part, n);
                Vec::load(part, n).store(row + j, n);
            }
#endif
        std::memcpy(rest, row, static_cast<size_t>(inputs_) * sizeof(float));
        float along = 0;
        for (int64_t k = 0; k < count; ++k) {
            const float* direction = screen_.directions + k * inputs_;
            const float part = product_of(row, direction, inputs_);
            for (int64_t j = 0; j < inputs_; j += Vec::kWidth) {
                const int64_t n = least(inputs_ - j, Vec::kWidth);
                fma(Vec::set(-part), Vec::load(direction + j, n), Vec::load(rest + j, n)).store(rest + j, n);
            }
            row[inputs_ + k] = part * screen_.stretch;
            along += part * part;
        }
        for (int64_t j = 0; j < inputs_; j += Vec::kWidth) {
            const int64_t n = least(inputs_ - j, Vec::kWidth);
            (Vec::load(rest + j, n) * Vec::load(screen_.weights + j, n)).store(rest + j, n);
        }
        const float beside = squares_of(rest, 0.0f, inputs_);
        const float all = std::sqrt(squares_of(row, 0.0f, wide)), items = static_cast<float>(wide);
        float largest = 0;
        for (int64_t j = 0; j < wide; ++j)
            largest = std::fmax(largest, std::fabs(row[j]));
        // Integers of fifteen bits and a sign are off by half a unit, and sums in float32 by one last bit per
        // number, for the scores of the sketch and of the projection.
        const float off = largest * std::sqrt(items) * 0x1p-15f + all * items * 0x1p-23f;
        Seen seen;
        seen.row = prepare({row, nullptr, wide, 1}, screen_.sketch, operands_ + operand_size_ * rank);
        seen.length = std::sqrt(beside + screen_.along * screen_.along * along) * (1 + 0x1p-12f);
        seen.slack = screen_.norms * off;
        return seen;
    }

    // Computes upper bounds of the scores of tokens [begin, end), and updates `top` with the token that seems
    // to be the best.
    void bound(const Seen& seen, int64_t begin, int64_t end, Best& top) {
        multiply(seen.row, screen_.sketch, begin, end, upper_ + begin, end - begin);
        suppressed_.hide(upper_ + begin, begin, end);
        look_through(upper_ + begin, end - begin, begin, top);
        const Vec length = Vec::set(seen.length), slack = Vec::set(seen.slack), scale = Vec::set(scale_);
        for (int64_t j = begin; j < end; j += Vec::kWidth) {
            const int64_t n = least(end - j, Vec::kWidth);
            const Vec score = Vec::load(upper_ + j, n);
            const Vec off = fma(length, Vec::load(screen_.errors + j, n), slack);
            // A bias may be far larger than what it is added to, and both sums are rounded.
            ((score + fma(abs(score), Vec::set(0x1p-22f), off)) * scale).store(upper_ + j, n);
        }
        suppressed_.hide(upper_ + begin, begin, end); // hidden scores have become NaN
    }

    // Whether one of a group of tokens may be the best; NaN always may.
    bool may_be(int64_t group, float least_score) const {
        bool may = false;
        for (int64_t j = group * kTogether; j < least(outputs_, (group + 1) * kTogether); ++j)
            may |= !(upper_[j] < least_score);
        return may;
    }

    template <class F>
    void look(int64_t first, int64_t last, int rank, F compute) {
        const int64_t begin = first * kTogether, end = least(outputs_, last * kTogether);
        looked_[rank] += end - begin;
        compute(begin, end);
    }

    const Screen& screen_;
    const Suppressed suppressed_;
    const int64_t inputs_, outputs_;
    const float scale_;
    float *upper_, *rows_;
    int64_t* looked_;
    Best* known_; // per thread, after its part of the sketch
    char* operands_;
    int64_t operand_size_;
};

} // namespace
} // namespace slipstream
