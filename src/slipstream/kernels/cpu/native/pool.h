// The thread pool: one team runs one job at a time; between jobs the workers spin briefly and then park.
#pragma once

#include <atomic>
#include <cstdint>

namespace slipstream {

class Members;

// The threads of one running job. Not all of them need be there: where other processes keep a thread from its
// processor, the job goes on without it. That is possible at a barrier, because all work is claimed, except
// for what rank 0 does, which is the calling thread; and it changes no result, because work is divided by
// `size`, which does not change. All members are defined in pool.cpp, which is compiled for any processor: if
// one were inlined into a translation unit of one instruction set, the linker could share that copy with the
// others.
class Team {
public:
    // `absent` of the threads do not take part. Without `members` nobody is waited for: a team of one.
    explicit Team(int size, Members* members = nullptr, int absent = 0);

    int size() const;

    // Whether the thread takes part in the current phase. What a thread keeps by its rank for others to read
    // must be initialized by rank 0 for those that do not. Not to be called before the first barrier.
    bool has(int rank) const;

    // Claims the next `grain` unclaimed items and returns the first; the caller stops when the result reaches
    // the item count.
    int64_t take(int64_t grain);

    // Like `take`, for items that are contiguous in memory: each thread has its own run and claims it piece
    // by piece; a thread that has finished its run continues in the run of another. Returns false when all
    // items are claimed.
    bool take_run(int rank, int64_t count, int64_t grain, int64_t* begin, int64_t* end);

    // Barrier: waits for all threads of the team that take part, then resets the claims for the next phase.
    // Does not return to a thread that takes no part in the next one (it throws what the pool catches).
    void meet();

private:
    // How much of a run is claimed, with the number of the phase in the upper bits: marks of an earlier phase
    // count as zero, so they need not be cleared.
    struct alignas(64) Taken {
        std::atomic<uint64_t> mark{0};
    };
    static constexpr int kMostRuns = 16; // with more threads, several share a run

    bool arrive(unsigned phase);
    void close(unsigned phase);
    void wait(unsigned phase);

    const int size_;
    Members* const members_;
    Taken runs_[kMostRuns];
    alignas(64) std::atomic<int64_t> next_{0};
    // How many have arrived at the barrier, and how many never will.
    alignas(64) std::atomic<int> arrived_;
    std::atomic<int> absent_;
    const int absent_first_;
    alignas(64) std::atomic<unsigned> phase_{0};
};

using Body = void (*)(void* context, Team& team, int rank);

// The number of threads that `run` uses at most when `wish` are requested: limited to the processors that
// this process may use.
int team_size(int wish);

// For tests: as if other processes crowded the processors, in all jobs from now on. No worker begins (0), or
// one leaves at that barrier of each job (1, 2, ...); -1 ends it.
void crowd(int barrier);

// Announces a job: parked workers wake up, which takes tens of microseconds, and spin for a moment until it
// arrives.
void rouse();

// The threads of one job, held for the lifetime of this object: as many as requested (see team_size), fewer
// if the system cannot create that many, or only the calling thread while another job holds the pool. Scratch
// must be sized for the actual `size()`: fewer threads may need more of it.
class Crew {
public:
    explicit Crew(int threads);
    ~Crew();
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    int size() const;

    // Runs `body` on all threads of the crew, including the calling one, and returns when all are done.
    void run(Body body, void* context) const;

private:
    void* pool_ = nullptr; // null: only the calling thread
    int size_ = 1;
};

// Runs `body` on a crew of `threads` threads.
void run(Body body, void* context, int threads);

} // namespace slipstream
