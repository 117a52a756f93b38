// Sampling of tokens as in ops/draw.py, without sorting the vocabulary, or greedy choice with a repetition
// penalty: one row per thread.
#pragma once

namespace slipstream {
namespace {

// The index of the largest chance / noise among the scores that remain and whose chance, relative to the best
// one's, is at least `floor`.
template <class Noise>
inline int64_t drawn(const float* x, int64_t n, float top, Remains remains, float floor, Noise noise) {
    // Allows for more than any rounding of the quotient.
    constexpr float kAlmost = 1.0f - 0x1p-20f;
    float best = -1.0f, chances[kSpan], lower[kSpan];
    int64_t place = -1;
    for (int64_t begin = 0; begin < n; begin += kSpan) {
        const int64_t count = least(kSpan, n - begin);
        if (highest(x + begin, count) < remains.low)
            continue;
        noise.lower(begin, count, lower);
        const Vec enough = Vec::set(best * kAlmost);
        Vec any = Vec::set(0);
        for (int64_t j = 0; j < count; j += Vec::kWidth) {
            const int64_t lanes = least(Vec::kWidth, count - j);
            const Vec chance = exponential(Vec::load(x + begin + j, lanes) - Vec::set(top));
            chance.store(chances + j, lanes);
            any = if_less(enough * Vec::load(lower + j, lanes), chance, Vec::set(1), any);
        }
        if (any.highest() == 0.0f)
            continue;
        for (int64_t j = 0; j < count; ++j) {
            if (!remains.has(x[begin + j], begin + j) || chances[j] < floor ||
                chances[j] < best * kAlmost * lower[j])
                continue;
            const float value = chances[j] / noise.exact(begin + j);
            if (value > best) {
                best = value;
                place = begin + j;
            }
        }
    }
    return place;
}

// Draws a token for each row, step after step. Every thread of a team has an object of its own over the same
// scratch memory.
class Draws {
public:
    Draws(const Draw& call, int64_t rows, int64_t vocabulary, Scratch& scratch, int threads)
        : call_(call), rows_(rows), vocabulary_(vocabulary),
          group_(!makes_noise() ? call.rows
                                : least(call.rows, most(kMostBytes / (8 * vocabulary), int64_t{1}))) {
        scores_ = scratch.part<float>(rows * vocabulary);
        found_ = scratch.part<Found>(rows);
        if (makes_noise()) {
            at_ = scratch.part<int64_t>(2);
            words_ = scratch.part<uint32_t>(2 * kTwisted + 2 * vocabulary * group_);
        }
        own_ = scratch.part<char>(DrawScratch::bytes(vocabulary) * threads);
    }

    // Where the caller writes the scores of a row before `run`.
    float* scores(int64_t row) const { return scores_ + row * vocabulary_; }

    // Draws one token of each row, or takes the best one, and writes it to out[row * stride]; -1 if there is
    // nothing to draw from.
    void run(Team& team, int rank, int64_t step, int64_t* out, int64_t stride) const {
        Scratch scratch(own_ + DrawScratch::bytes(vocabulary_) * rank);
        const DrawScratch own(scratch, vocabulary_);
        for (int64_t first = 0; first < call_.rows; first += group_) {
            each(team, 1 + rows_, 1, [&](int64_t i, int64_t) {
                if (i == 0)
                    begin(step, first);
                else if (is_in(i - 1, first))
                    look(i - 1, own);
            });
            each(team, rows_, 1, [&](int64_t r, int64_t) {
                if (!is_in(r, first))
                    return;
                const int64_t token =
                    call_.best ? best_place(scores(r), vocabulary_) : choose(r, step, first);
                if (call_.seen && token >= 0)
                    seen(r)[token] = 1;
                out[r * stride] = token;
            });
        }
        if (rank == 0 && makes_noise())
            leave();
    }

private:
    static constexpr int64_t kMostBytes = 8 << 20; // of random words at once

    struct Found {
        Remains remains;
        float top;
    };

    bool makes_noise() const { return !call_.noise && !call_.best; }
    uint8_t* seen(int64_t row) const { return call_.seen + place(row) * vocabulary_; }
    int64_t place(int64_t row) const { return call_.places ? call_.places[row] : row; }
    bool is_in(int64_t row, int64_t first) const {
        return place(row) >= first && place(row) < first + group_;
    }

    // Generates the random words for a group of rows of the batch.
    void begin(int64_t step, int64_t first) const {
        if (!makes_noise())
            return;
        if (step == 0 && first == 0) {
            for (int64_t i = 0; i < kTwisted; ++i)
                words_[i] = static_cast<uint32_t>(call_.generator->state[i]);
            at_[1] = kTwisted + 1 - call_.generator->left;
        }
        settle();
        at_[0] = at_[1];
        at_[1] += 2 * vocabulary_ * least(group_, call_.rows - first);
        twist(words_, ceil_div(at_[1], kTwisted) * kTwisted - kTwisted);
    }

    // Moves the block of generator state that the next word is in, or directly follows, to the front.
    void settle() const {
        const int64_t blocks = at_[1] ? (at_[1] - 1) / kTwisted : 0;
        std::memmove(words_, words_ + blocks * kTwisted, kTwisted * sizeof(uint32_t));
        at_[1] -= blocks * kTwisted;
    }

    void leave() const {
        settle();
        Generator& generator = *call_.generator;
        for (int64_t i = 0; i < kTwisted; ++i)
            generator.state[i] = words_[i];
        generator.left = static_cast<int32_t>(kTwisted + 1 - at_[1]);
        generator.next = static_cast<uint64_t>(at_[1]);
    }

    // Applies the repetition penalty; eight marks are tested at once, because most are zero.
    void penalise(int64_t row) const {
        const uint8_t* marks = seen(row);
        float* x = scores(row);
        const auto lower = [&](int64_t j) {
            if (marks[j])
                x[j] = x[j] < 0 ? x[j] * call_.penalty : x[j] / call_.penalty;
        };
        int64_t j = 0;
        for (; j + 8 <= vocabulary_; j += 8) {
            uint64_t eight;
            std::memcpy(&eight, marks + j, sizeof(eight));
            for (int64_t i = 0; eight && i < 8; ++i)
                lower(j + i);
        }
        for (; j < vocabulary_; ++j)
            lower(j);
    }

    // Divides the scores by the temperature and determines which of them remain.
    void look(int64_t row, const DrawScratch& own) const {
        float* x = scores(row);
        if (call_.seen)
            penalise(row);
        if (call_.best)
            return;
        const Vec temperature = Vec::set(call_.numbers[0]), lowest = Vec::set(-3.402823466e38f);
        Vec odd = Vec::set(0);
        for (int64_t j = 0; j < vocabulary_; j += Vec::kWidth) {
            const int64_t lanes = least(Vec::kWidth, vocabulary_ - j);
            const Vec score = Vec::load(x + j, lanes) / temperature;
            score.store(x + j, lanes);
            odd = fma(max(lowest, score), Vec::set(0), odd); // NaN if any is NaN or infinite
        }
        Found& found = found_[row];
        found.top = odd.sum() == 0.0f ? highest(x, vocabulary_) : kNever;
        found.remains = {kNever, 0};
        if (found.top == kNever)
            return;
        const float k = call_.numbers[1]; // may be infinity, which has no integer value
        if (k < static_cast<float>(vocabulary_))
            found.remains.low = best_of(x, vocabulary_, static_cast<int64_t>(k), own.scores);
        if (call_.numbers[2] >= 0.0f)
            found.remains =
                Nucleus(x, vocabulary_, found.top, own).remains(found.remains.low, call_.numbers[2]);
    }

    int64_t choose(int64_t row, int64_t step, int64_t first) const {
        const Found& found = found_[row];
        if (found.top == kNever)
            return -1;
        const auto pick = [&](auto noise) {
            return drawn(scores(row), vocabulary_, found.top, found.remains, call_.numbers[3], noise);
        };
        if (call_.noise)
            return pick(GivenNoise{call_.noise + (step * call_.rows + place(row)) * vocabulary_});
        return pick(WordNoise{words_ + at_[0] + 2 * vocabulary_ * (place(row) - first)});
    }

    const Draw& call_;
    const int64_t rows_, vocabulary_, group_;
    float* scores_;
    Found* found_;
    int64_t* at_ = nullptr; // index of the next word, before and after the words of a group were generated
    uint32_t* words_ = nullptr;
    char* own_;
};

inline int64_t draw_bytes(const DrawCall& call, int threads) {
    Scratch scratch(nullptr);
    const Draws counted(call.draw, call.rows, call.vocabulary, scratch, threads);
    return scratch.used();
}

inline void draw(const DrawCall& call, char* base, Team& team, int rank) {
    Scratch scratch(base);
    const Draws draws(call.draw, call.rows, call.vocabulary, scratch, team.size());
    each_one(team, call.rows, [&](int64_t r) {
        read_row(call.scores, call.dtype, r * call.vocabulary, draws.scores(r), call.vocabulary);
    });
    draws.run(team, rank, 0, call.out, 1);
}

} // namespace
} // namespace slipstream
