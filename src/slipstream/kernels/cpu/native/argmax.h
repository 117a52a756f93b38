// The best of a row of scores, as torch.argmax defines it: the first NaN if there is one, otherwise the first
// highest score.
#pragma once

namespace slipstream {
namespace {

// The best logit of a row so far; index -1 if none was examined yet.
struct Best {
    float value;
    int64_t index;
};

// Return whether `a` precedes `b` in the order of torch.argmax: NaN is above everything, and the lowest index
// wins among equals.
inline bool is_better(Best a, Best b) {
    if (b.index < 0 || a.index < 0)
        return a.index >= 0;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan)
        return a_nan;
    return a.value > b.value || ((a_nan || a.value == b.value) && a.index < b.index);
}

// Tokens that must not be chosen, in ascending order.
struct Suppressed {
    const int64_t* ids;
    int64_t count;

    // Set the scores of the suppressed tokens in [begin, end) to -infinity; `x` starts at token `begin`.
    void hide(float* x, int64_t begin, int64_t end) const {
        for (int64_t i = below(begin); i < count && ids[i] < end; ++i)
            x[ids[i] - begin] = kNever;
    }

    // Return how many suppressed tokens are below `token`. Not std::lower_bound: the linker would keep a
    // single copy of it, compiled for any one of the instruction sets.
    int64_t below(int64_t token) const {
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (ids[middle] < token)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
};

// Update `best` with logits [first, first + n) of a row. A vectorized maximum skips pieces that hold nothing
// better, which are most of them.
inline void look_through(const float* x, int64_t n, int64_t first, Best& best) {
    Vec top = Vec::load(x, least(n, Vec::kWidth)), odd = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const Vec part = Vec::load(x + j, least(n - j, Vec::kWidth));
        top = max(top, part);
        odd = fma(part, Vec::set(0), odd); // NaN if any value is NaN or infinite
    }
    float lanes[Vec::kWidth], highest;
    top.store(lanes);
    highest = lanes[0];
    for (float lane : lanes)
        highest = lane > highest ? lane : highest;
    const bool worse = highest < best.value || (highest == best.value && first > best.index);
    if (best.index >= 0 && worse && odd.sum() == 0.0f)
        return;
    for (int64_t j = 0; j < n; ++j)
        if (is_better({x[j], first + j}, best))
            best = {x[j], first + j};
}

// Return the index of the best of n scores, searched in pieces.
inline int64_t best_place(const float* x, int64_t n) {
    constexpr int64_t kPiece = 512;
    Best best = {0.0f, -1};
    for (int64_t j = 0; j < n; j += kPiece)
        look_through(x + j, least(kPiece, n - j), j, best);
    return best.index;
}

} // namespace
} // namespace slipstream
