// The best of scores: the first of the highest, or of those that are NaN.
#pragma once

namespace slipstream {
namespace {

// The best logit so far of one row; index -1 where none was seen.
struct Best {
    float value;
    int64_t index;
};

// torch.argmax: NaN is above everything, and the lowest index wins among equals.
inline bool is_better(Best a, Best b) {
    if (b.index < 0 || a.index < 0)
        return a.index >= 0;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan)
        return a_nan;
    return a.value > b.value || ((a_nan || a.value == b.value) && a.index < b.index);
}

// Tokens that are not to be chosen, in rising order.
struct Suppressed {
    const int64_t* ids;
    int64_t count;

    // Hides those among scores [begin, end), which begin at x.
    void hide(float* x, int64_t begin, int64_t end) const {
        for (int64_t i = below(begin); i < count && ids[i] < end; ++i)
            x[ids[i] - begin] = kNever;
    }

    // How many are below a token. Not std::lower_bound: the linker would keep one copy of it, compiled for
    // any of the instruction sets.
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

// Looks through logits [first, first + n) of a row; most pieces hold none that is better.
inline void look_through(const float* x, int64_t n, int64_t first, Best& best) {
    Vec top = Vec::load(x, least(n, Vec::kWidth)), odd = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const Vec part = Vec::load(x + j, least(n - j, Vec::kWidth));
        top = max(top, part);
        odd = fma(part, Vec::set(0), odd); // NaN where there is one, or infinity
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

// The place of the best of n scores, piece by piece.
inline int64_t best_place(const float* x, int64_t n) {
    constexpr int64_t kPiece = 512;
    Best best = {0.0f, -1};
    for (int64_t j = 0; j < n; j += kPiece)
        look_through(x + j, least(kPiece, n - j), j, best);
    return best.index;
}

} // namespace
} // namespace slipstream
