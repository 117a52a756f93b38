// Packs a dense matrix, distributed over the team by rows.
#pragma once

// clang-format off: the later headers depend on the first ones
#include "pack_numbers.h"
#include "pack_groups.h"
#include "pack_rows.h"
#include "pack_floats.h"
#include "pack_bf13.h"
// clang-format on

namespace slipstream {
namespace {

// rows of a tile: whole vectors of groups, whatever the number of groups per row
constexpr int64_t kPackTile = 16;
constexpr int64_t kLongRow = 4096; // longer rows are packed in tiles of one

struct PackScratch {
    PackScratch(const PackCall& call, char* base, int threads) {
        const Matrix& m = call.packed;
        rows = m.group && m.inputs <= kLongRow ? kPackTile : 1;
        own_floats = m.group ? rows * ceil_div(m.inputs, m.group) * m.group : m.inputs;
        if (m.format == kBf13) { // the row, and its bits
            rows = 1;
            own_floats = ceil_div(m.inputs, 16) * 16 + ceil_div(m.inputs, m.group) * m.group / 2;
        }
        own_floats = ceil_div(own_floats, 16) * 16;
        Scratch scratch(base);
        own = scratch.part<float>(own_floats * threads);
        bytes = scratch.used();
    }
    int64_t rows, own_floats, bytes;
    float* own;
};

inline int64_t pack_bytes(const PackCall& call, int threads) {
    return PackScratch(call, nullptr, threads).bytes;
}

inline void pack(const PackCall& call, char* base, Team& team, int rank) {
    const PackScratch scratch(call, base, team.size());
    float* own = scratch.own + scratch.own_floats * rank;
    each(team, call.packed.outputs, scratch.rows, [&](int64_t begin, int64_t end) {
        if (call.packed.format == kBf13)
            pack_bf13(call, begin, own);
        else if (call.packed.format == kFp6E2m3)
            pack_floats<E2m3>(call, begin, end - begin, own);
        else if (call.packed.format == kFp6E3m2)
            pack_floats<E3m2>(call, begin, end - begin, own);
        else if (call.packed.group)
            pack_groups(call, begin, end - begin, own);
        else if (call.packed.format == kFp8)
            pack_row<E4m3>(call, begin, own);
        else
            pack_row<Integers>(call, begin, own);
    });
}

} // namespace
} // namespace slipstream
