// Storage types, small arithmetic helpers and the dispatch over dtypes. Included only by the isa_*.cpp files:
// everything is in an anonymous namespace, so that the linker cannot merge code of units compiled for
// different instruction sets.
//
// Loops over arrays of registers are always marked `#pragma GCC unroll`: gcc 12 splits arrays into scalars
// before its own unrolling, and therefore keeps an unmarked array in memory across the innermost loop. A
// product of 8 rows, 256 columns and 20 steps ran at 0.78 of the peak rate without the marks, and at 0.97
// with them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "kernels.h"

namespace slipstream {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

constexpr int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
constexpr int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}
constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Call `f` with a null pointer of the storage type of a dtype.
template <class F>
inline void with_dtype(int32_t dtype, F f) {
    if (dtype == kFloat32)
        f(static_cast<float*>(nullptr));
    else if (dtype == kBfloat16)
        f(static_cast<Bf16*>(nullptr));
    else
        f(static_cast<Half*>(nullptr));
}

// Call `f` with `rows`, which is at most kMost (6 or more), as a compile-time constant.
template <int kMost, class F>
inline void with_rows(int64_t rows, F f) {
    if (rows == 1)
        f(std::integral_constant<int, 1>());
    else if (rows == 2)
        f(std::integral_constant<int, 2>());
    else if (rows == 3)
        f(std::integral_constant<int, 3>());
    else if (rows == 4)
        f(std::integral_constant<int, 4>());
    else if (rows == 5)
        f(std::integral_constant<int, 5>());
    else if (rows == 6)
        f(std::integral_constant<int, 6>());
    else if (kMost > 6 && rows == 7)
        f(std::integral_constant<int, least(7, kMost)>());
    else if (kMost > 6)
        f(std::integral_constant<int, kMost>());
}

constexpr int32_t dtype_of(const float*) {
    return kFloat32;
}
constexpr int32_t dtype_of(const Bf16*) {
    return kBfloat16;
}
constexpr int32_t dtype_of(const Half*) {
    return kFloat16;
}

// Prefetch the cache line at `p`, which need not be mapped, into the second-level cache. Prefetching into the
// first level delays other accesses: one row of int4 then ran at 0.55 of the rate, and a decode step with a
// context of 4096 tokens took 1.6 times as long.
inline void prefetch(const void* p) {
    __builtin_prefetch(p, 0, 2);
}

// Prefetches one range of memory and then another, `lines` cache lines per call of `some`.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    int64_t lines = 0;
    const char *then = nullptr, *then_end = nullptr;

    void some() {
        for (int64_t i = 0; i < lines && at < end; ++i, at += 64)
            prefetch(at);
        if (at >= end && then != then_end) {
            at = then;
            end = then_end;
            then = then_end;
        }
    }
};

// Distribute [0, count) over the team in pieces of `grain`; return when all of it is done.
template <class F>
inline void each(Team& team, int64_t count, int64_t grain, F f) {
    for (int64_t begin; (begin = team.take(grain)) < count;)
        f(begin, least(begin + grain, count));
    team.meet();
}

// Call f(i) for each i in [0, count), in two pieces per thread.
template <class F>
inline void each_one(Team& team, int64_t count, F f) {
    each(team, count, ceil_div(count, 2 * static_cast<int64_t>(team.size())),
         [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i)
                 f(i);
         });
}

// Distribute what is read from memory sequentially: each thread works on its own contiguous run for as long
// as possible.
template <class F>
inline void each_in_runs(Team& team, int rank, int64_t count, int64_t grain, F f) {
    for (int64_t begin, end; team.take_run(rank, count, grain, &begin, &end);)
        f(begin, end);
    team.meet();
}

// Call f(rank) for what this thread keeps by its rank, and on rank 0 for what the absent threads would keep.
template <class F>
inline void each_own(const Team& team, int rank, F f) {
    f(rank);
    for (int other = 1; rank == 0 && other < team.size(); ++other)
        if (!team.has(other))
            f(other);
}

// Divides scratch memory into parts aligned to 64 bytes. With a null base it only computes the size.
class Scratch {
public:
    explicit Scratch(char* base) : base_(base) {}
    template <class T>
    T* part(int64_t count) {
        T* at = reinterpret_cast<T*>(base_ + used_);
        used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
        return at;
    }
    int64_t used() const { return used_; }

private:
    char* base_;
    int64_t used_ = 0;
};

} // namespace
} // namespace slipstream
