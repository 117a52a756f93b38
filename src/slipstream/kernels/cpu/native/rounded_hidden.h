// Rows that are rounded to bytes for the second matrix of a feed-forward, kept in the layout of the first
// product's result, tokens interleaved: they are rounded and packed in this layout, without transposing.
//
// kept     [group][output][token in group]     float32
#pragma once

namespace slipstream {
namespace {

// Whether the rows that `U` packs are kept this way.
template <class U>
constexpr bool kKeeps = Vec::kBf16Dot && U::kRounds && !U::kPacksRows;

inline void keep_piece(const Piece& p, int64_t width, float* kept) {
    for (int64_t t = 0; t < p.tokens; t += kGroup) {
        float* to = kept + (p.token + t) * width + p.begin * kGroup;
        for (int64_t j = 0; j < p.outputs; ++j)
            Vec::load(p.c + j * p.stride + t).store(to + j * kGroup);
    }
}

// Like `grid_of`, for each token of a group.
inline void grids_of(const float* kept, int64_t inputs, bool with_zero, Grid* grids) {
    Vec low[2] = {Vec::set(0), Vec::set(0)}, high[2] = {Vec::set(0), Vec::set(0)}, odd = Vec::set(0);
    for (int64_t j = 0; j < inputs; ++j) {
        const Vec v = Vec::load(kept + j * kGroup);
        low[j % 2] = min(v, low[j % 2]);
        high[j % 2] = max(v, high[j % 2]);
        odd = fma(v, Vec::set(0), odd);
    }
    alignas(64) float bottoms[kGroup], tops[kGroup], odds[kGroup];
    (Vec::set(0) - min(low[0], low[1])).store(bottoms);
    max(high[0], high[1]).store(tops);
    odd.store(odds);
    for (int64_t t = 0; t < kGroup; ++t)
        grids[t] = grid_between(bottoms[t], tops[t], odds[t], with_zero);
}

// Like `pack_group`, for a whole group.
template <class U>
inline void pack_kept_group(const float* kept, int64_t inputs, const Grid* grids, typename U::Item* out) {
    static_assert(U::kItems == 4, "a word is a byte of each of four inputs");
    alignas(64) float numbers[2][kGroup];
    for (int64_t t = 0; t < kGroup; ++t) {
        numbers[0][t] = grids[t].times;
        numbers[1][t] = grids[t].zero;
    }
    const Vec times = Vec::load(numbers[0]), zero = Vec::load(numbers[1]), nothing = Vec::set(U::kPadding);
    constexpr int64_t line = line_items<U>();
    for (int64_t i = 0; i < inputs; i += line, out += kGroup * packed_items<U>(line)) {
        for (int64_t k = 0; k < line; k += 4) {
            const auto code = [&](int64_t j) {
                return j < inputs ? code_of(Vec::load(kept + j * kGroup), times, zero) : nothing;
            };
            const int64_t j = i + k;
            U::word(code(j), code(j + 1), code(j + 2), code(j + 3)).store(out + k * kGroup);
        }
        if constexpr (U::kBetween > 0)
            U::part(out);
    }
}

// Like `pack_rows`.
template <class U>
inline void pack_kept(const float* kept, int64_t tokens, const Matrix& m, void* packed, Team& team) {
    auto* out = static_cast<typename U::Item*>(packed);
    each(team, ceil_div(tokens, kGroup), 1, [&](int64_t group, int64_t) {
        const int64_t t = group * kGroup;
        Grid grids[kGroup];
        grids_of(kept + t * m.inputs, m.inputs, m.input_zero != 0, grids);
        pack_kept_group<U>(kept + t * m.inputs, m.inputs, grids,
                           out + t * packed_items<U>(padded<U>(m.inputs)));
        store_grids<U>(grids, t, tokens, m.inputs, out);
    });
}

} // namespace
} // namespace slipstream
