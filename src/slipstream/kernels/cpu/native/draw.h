// The choice of tokens by chance, as ops/draw.py has it, without sorting the vocabulary: one row per thread.
#pragma once

namespace slipstream {
namespace {

// Order of floats as order of whole numbers, and back.
inline uint32_t ordered(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float of_ordered(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The k-th largest of n numbers, byte by byte.
inline float largest(const float* x, int64_t n, int64_t k) {
    uint32_t found = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int32_t counts[256] = {};
        for (int64_t i = 0; i < n; ++i)
            if ((ordered(x[i]) & known) == found)
                ++counts[(ordered(x[i]) >> shift) & 255];
        uint32_t digit = 255;
        for (; counts[digit] < k; --digit)
            k -= counts[digit];
        found |= digit << shift;
        known |= 255u << shift;
    }
    return of_ordered(found);
}

constexpr int64_t kSpan = 32; // scores that are looked at together

inline float highest(const float* x, int64_t n) {
    Vec top = Vec::set(kNever);
    int64_t j = 0;
    for (; j + Vec::kWidth <= n; j += Vec::kWidth)
        top = max(top, Vec::load(x + j));
    float best = top.highest();
    for (; j < n; ++j)
        best = x[j] > best ? x[j] : best;
    return best;
}

// What remains of a row: scores above `low`, and those that equal it from place `from` on.
struct Remains {
    float low;
    int64_t from;
    bool has(float score, int64_t place) const {
        return score > low || (score == low && place >= from && score > kNever);
    }
};

// What one thread needs beside a row's scores.
struct DrawScratch {
    float *scores, *chances; // some of the row, in order, their chances beside the best one's,
    int32_t* places;         // and where they stand

    DrawScratch(Scratch& scratch, int64_t vocabulary)
        : scores(scratch.part<float>(vocabulary)), chances(scratch.part<float>(vocabulary)),
          places(scratch.part<int32_t>(vocabulary)) {}

    static int64_t bytes(int64_t vocabulary) {
        Scratch scratch(nullptr);
        const DrawScratch counted(scratch, vocabulary);
        return scratch.used();
    }
};

// The k-th largest score, or kNever where there are no k: what is larger than the k best of those before is
// kept, and cut down to k once there are several times as many.
inline float best_of(const float* x, int64_t n, int64_t k, float* kept) {
    const int64_t room = least(n, most(4 * k, 1024));
    int64_t count = 0;
    float low = kNever;
    for (int64_t begin = 0; begin < n; begin += kSpan) {
        const int64_t end = least(begin + kSpan, n);
        if (!(highest(x + begin, end - begin) > low))
            continue;
        for (int64_t j = begin; j < end; ++j) {
            if (!(x[j] > low))
                continue;
            if (count == room) {
                low = largest(kept, count, k);
                int64_t above = 0;
                for (int64_t i = 0; i < count; ++i)
                    if (kept[i] > low)
                        kept[above++] = kept[i];
                for (; above < k; ++above)
                    kept[above] = low;
                count = k;
            }
            kept[count++] = x[j];
        }
    }
    return count < k ? kNever : largest(kept, count, k);
}

// What the nucleus leaves of the scores that are not below `low`: as many of the least as have no more than
// `rest` of the chances together go, but for the last. Where equal ones are parted, those that stand first
// go.
class Nucleus {
public:
    Nucleus(const float* x, int64_t n, float top, const DrawScratch& scratch)
        : x_(x), n_(n), top_(top), s_(scratch) {}

    Remains remains(float low, float rest) {
        double total = gather(low), gone = 0;
        const double most_gone = static_cast<double>(rest) * total;
        while (count_ > kFew && narrow(most_gone, gone))
            ;
        if (count_ <= kFew)
            sort();
        int64_t i = 0;
        for (; i < count_ - 1; ++i) {
            gone += static_cast<double>(s_.chances[i]);
            if (gone > most_gone)
                break;
        }
        return {s_.scores[i], s_.places[i]};
    }

private:
    static constexpr int64_t kFew = 64;

    // Takes what is not below `low`; returns the sum of the chances.
    double gather(float low) {
        count_ = 0;
        for (int64_t begin = 0; begin < n_; begin += kSpan) {
            const int64_t end = least(begin + kSpan, n_);
            if (highest(x_ + begin, end - begin) < low)
                continue;
            for (int64_t j = begin; j < end; ++j) {
                s_.scores[count_] = x_[j];
                s_.places[count_] = static_cast<int32_t>(j);
                count_ += x_[j] >= low && x_[j] > kNever;
            }
        }
        double total = 0;
        for (int64_t begin = 0; begin < count_; begin += kSpan) {
            Vec sum = Vec::set(0);
            for (int64_t j = begin; j < least(begin + kSpan, count_); j += Vec::kWidth) {
                const int64_t lanes = least(Vec::kWidth, count_ - j);
                exponential(Vec::load(s_.scores + j, lanes) - Vec::set(top_)).store(s_.chances + j, lanes);
                sum = sum + Vec::load(s_.chances + j, lanes);
            }
            total += static_cast<double>(sum.sum());
        }
        return total;
    }

    // Leaves the bucket of scores within which the nucleus ends, and adds what is below it to `gone`. False
    // where all scores are equal.
    bool narrow(double most_gone, double& gone) {
        constexpr int kBuckets = 256;
        float low = s_.scores[0], high = low;
        for (int64_t i = 1; i < count_; ++i) {
            low = s_.scores[i] < low ? s_.scores[i] : low;
            high = s_.scores[i] > high ? s_.scores[i] : high;
        }
        const float scale = (kBuckets - 1) / (high - low);
        if (!(scale < 1e30f))
            return false;
        const auto bucket = [&](float score) {
            return least(static_cast<int64_t>((high - score) * scale), kBuckets - 1);
        };
        double chances[kBuckets] = {};
        for (int64_t i = 0; i < count_; ++i)
            chances[bucket(s_.scores[i])] += static_cast<double>(s_.chances[i]);
        int64_t last = kBuckets - 1;
        for (; last > 0 && gone + chances[last] <= most_gone; --last)
            gone += chances[last];
        int64_t left = 0;
        for (int64_t i = 0; i < count_; ++i) {
            if (bucket(s_.scores[i]) != last)
                continue;
            s_.scores[left] = s_.scores[i];
            s_.chances[left] = s_.chances[i];
            s_.places[left++] = s_.places[i];
        }
        // Sums in another order may say that the last bucket goes, too: then the best ones end the nucleus.
        return left > 0 && left < count_ ? (count_ = left, true) : false;
    }

    // The least first, those that are equal as they stand.
    void sort() {
        for (int64_t i = 1; i < count_; ++i) {
            const float score = s_.scores[i], chance = s_.chances[i];
            const int32_t place = s_.places[i];
            int64_t j = i;
            for (; j > 0 && s_.scores[j - 1] > score; --j) {
                s_.scores[j] = s_.scores[j - 1];
                s_.chances[j] = s_.chances[j - 1];
                s_.places[j] = s_.places[j - 1];
            }
            s_.scores[j] = score;
            s_.chances[j] = chance;
            s_.places[j] = place;
        }
    }

    const float* x_;
    const int64_t n_;
    const float top_;
    const DrawScratch& s_;
    int64_t count_ = 0;
};

// The place of the largest chance / noise among the scores that remain and have `floor` of the best one's
// chance at least.
template <class Noise>
inline int64_t drawn(const float* x, int64_t n, float top, Remains remains, float floor, Noise noise) {
    // Less than what any rounding of the quotient could add.
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

// Draws a token of each row, step after step. Every thread of a team has one of its own over the same memory.
class Draws {
public:
    Draws(const Draw& call, int64_t rows, int64_t vocabulary, Scratch& scratch, int threads)
        : call_(call), rows_(rows), vocabulary_(vocabulary),
          group_(call.noise ? call.rows : least(call.rows, most(kMostBytes / (8 * vocabulary), int64_t{1}))) {
        scores_ = scratch.part<float>(rows * vocabulary);
        found_ = scratch.part<Found>(rows);
        if (!call.noise) {
            at_ = scratch.part<int64_t>(2);
            words_ = scratch.part<uint32_t>(2 * kTwisted + 2 * vocabulary * group_);
        }
        own_ = scratch.part<char>(DrawScratch::bytes(vocabulary) * threads);
    }

    // Where the row's scores are put before `run`.
    float* scores(int64_t row) const { return scores_ + row * vocabulary_; }

    // Draws one token of each row, and writes it to out[row * stride]: -1 where there is nothing to draw
    // from.
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
                if (is_in(r, first))
                    out[r * stride] = choose(r, step, first);
            });
        }
        if (rank == 0 && !call_.noise)
            leave();
    }

private:
    static constexpr int64_t kMostBytes = 8 << 20; // of words at once

    struct Found {
        Remains remains;
        float top;
    };

    int64_t place(int64_t row) const { return call_.places ? call_.places[row] : row; }
    bool is_in(int64_t row, int64_t first) const {
        return place(row) >= first && place(row) < first + group_;
    }

    // Makes the words of a group of the batch's rows.
    void begin(int64_t step, int64_t first) const {
        if (call_.noise)
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

    // Moves the block that the next word is in, or follows, to the front.
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

    // Divides the scores by the temperature and finds which of them remain.
    void look(int64_t row, const DrawScratch& own) const {
        float* x = scores(row);
        const Vec temperature = Vec::set(call_.numbers[0]), lowest = Vec::set(-3.402823466e38f);
        Vec odd = Vec::set(0);
        for (int64_t j = 0; j < vocabulary_; j += Vec::kWidth) {
            const int64_t lanes = least(Vec::kWidth, vocabulary_ - j);
            const Vec score = Vec::load(x + j, lanes) / temperature;
            score.store(x + j, lanes);
            odd = fma(max(lowest, score), Vec::set(0), odd); // NaN where there is one, or infinity
        }
        Found& found = found_[row];
        found.top = odd.sum() == 0.0f ? highest(x, vocabulary_) : kNever;
        found.remains = {kNever, 0};
        if (found.top == kNever)
            return;
        const auto k = static_cast<int64_t>(call_.numbers[1]);
        if (k < vocabulary_)
            found.remains.low = best_of(x, vocabulary_, k, own.scores);
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
    int64_t* at_ = nullptr; // the next word, before the words of a group were made and after
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
