// Storage types, small arithmetic and the dispatch over dtypes. Included by the isa_*.cpp alone: everything
// is in an anonymous namespace, so that no unit's code can be taken for another's.
//
// Loops over arrays of registers are marked `#pragma GCC unroll` wherever they stand: gcc 12 takes an array
// apart before it unrolls on its own account, and so keeps an unmarked one in memory around the innermost
// loop. A product of 8 rows, 256 columns and 20 steps then ran at 0.78 of the rate, and at 0.97 so marked.
#pragma once

#include <cstdint>
#include <cstring>
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

// Calls `f` with a null pointer of the storage type.
template <class F>
inline void with_dtype(int32_t dtype, F f) {
    if (dtype == kFloat32)
        f(static_cast<float*>(nullptr));
    else if (dtype == kBfloat16)
        f(static_cast<Bf16*>(nullptr));
    else
        f(static_cast<Half*>(nullptr));
}

// Calls `f` with a number of rows, of at most kMost (6 or more), as a constant.
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

// Asks for the line at `p`, which need not be there, to come into the second cache. On the way to
// the first it keeps others waiting: one row of int4 then came at 0.55 of the rate, and a step of decode
// behind 4096 tokens took 1.6 times as long.
inline void prefetch(const void* p) {
    __builtin_prefetch(p, 0, 2);
}

// Asks for a piece of memory before it is needed, and then for another one, a little at a time.
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

// Shares [0, count) out to the team in pieces of `grain`, and returns when all of it is done.
template <class F>
inline void each(Team& team, int64_t count, int64_t grain, F f) {
    for (int64_t begin; (begin = team.take(grain)) < count;)
        f(begin, least(begin + grain, count));
    team.meet();
}

// Calls f(i) for i of [0, count), in two pieces per thread.
template <class F>
inline void each_one(Team& team, int64_t count, F f) {
    each(team, count, ceil_div(count, 2 * static_cast<int64_t>(team.size())),
         [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i)
                 f(i);
         });
}

// Shares out what is read from memory in order: each thread keeps to a run of its own as long as it can.
template <class F>
inline void each_in_runs(Team& team, int rank, int64_t count, int64_t grain, F f) {
    for (int64_t begin, end; team.take_run(rank, count, grain, &begin, &end);)
        f(begin, end);
    team.meet();
}

// Cuts scratch into parts, each aligned to 64 bytes; with a null base it only counts.
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
