// Which scores of a row may be drawn: top-k and top-p (nucleus) without sorting the vocabulary.
#pragma once

namespace slipstream {
namespace {

// Maps floats to integers of the same order, and back.
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

// The k-th largest of n numbers, found byte by byte (radix select).
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

constexpr int64_t kSpan = 32; // scores that are tested together

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

// What remains of a row: scores above `low`, and those equal to it from index `from` on.
struct Remains {
    float low;
    int64_t from;
    bool has(float score, int64_t place) const {
        return score > low || (score == low && place >= from && score > kNever);
    }
};

// Scratch of one thread, in addition to a row's scores.
struct DrawScratch {
    float *scores, *chances; // the candidate scores in order, their chances relative to the best one's,
    int32_t* places;         // and their indices in the row

    DrawScratch(Scratch& scratch, int64_t vocabulary)
        : scores(scratch.part<float>(vocabulary)), chances(scratch.part<float>(vocabulary)),
          places(scratch.part<int32_t>(vocabulary)) {}

    static int64_t bytes(int64_t vocabulary) {
        Scratch scratch(nullptr);
        const DrawScratch counted(scratch, vocabulary);
        return scratch.used();
    }
};

// The k-th largest score, or kNever if there are fewer than k. Keeps the scores that exceed the k-th best so
// far, and cuts them down to k whenever there are several times as many.
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

// Top-p over the scores that are not below `low`: removes the lowest scores as long as their combined chance
// is at most `rest` of the total, but always keeps one. If only some of several equal scores are removed, it
// is those with the lowest indices.
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

    // Collects the scores that are not below `low`; returns the sum of their chances.
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

    // Keeps only the bucket of scores in which the nucleus ends, and adds the chances below it to `gone`.
    // Returns false if this cannot narrow the candidates, e.g. if all scores are equal.
    bool narrow(double most_gone, double& gone) {
        constexpr int kBuckets = 256;
        float low = s_.scores[0], high = low;
        for (int64_t i = 1; i < count_; ++i) {
            low = s_.scores[i] < low ? s_.scores[i] : low;
            high = s_.scores[i] > high ? s_.scores[i] : high;
        }
        if (!(high > low))
            return false;
        const float half = 0.5f * high - 0.5f * low; // `high - low` may be infinite
        if (!(half > 0.0f))
            return false;
        const auto bucket = [&](float score) {
            const float place = (0.5f * high - 0.5f * score) / half; // from 0 to 1
            return least(static_cast<int64_t>(place * (kBuckets - 1)), kBuckets - 1);
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
        // Sums in another order round differently, so all buckets may seem to be removed: then the nucleus
        // ends in the best one.
        return left > 0 && left < count_ ? (count_ = left, true) : false;
    }

    // Sorts by ascending score; equal scores keep their order.
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

} // namespace
} // namespace slipstream
