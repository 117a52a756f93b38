// The thread pool: one team runs one job at a time; between jobs the workers spin briefly and then park.
#pragma once

#include <atomic>
#include <cstdint>

namespace slipstream {

// The threads of one running job. All members are defined in pool.cpp, which is compiled for any processor:
// if one were inlined into a translation unit of one instruction set, the linker could share that copy with
// the others.
class Team {
public:
    explicit Team(int size) : size_(size) {}

    int size() const;

    // Claims the next `grain` unclaimed items and returns the first; the caller stops when the result reaches
    // the item count.
    int64_t take(int64_t grain);

    // Like `take`, for items that are contiguous in memory: each thread has its own run and claims it piece
    // by piece; a thread that has finished its run continues in the run of another. Returns false when all
    // items are claimed.
    bool take_run(int rank, int64_t count, int64_t grain, int64_t* begin, int64_t* end);

    // Barrier: waits for all threads of the team, then resets the claims for the next phase.
    void meet();

private:
    // How much of a run is claimed, with the number of the phase in the upper bits: marks of an earlier phase
    // count as zero, so they need not be cleared.
    struct alignas(64) Taken {
        std::atomic<uint64_t> mark{0};
    };
    static constexpr int kMostRuns = 16; // with more threads, several share a run

    const int size_;
    Taken runs_[kMostRuns];
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

using Body = void (*)(void* context, Team& team, int rank);

// The number of threads that `run` uses at most when `wish` are requested: limited to the processors that
// this process may use.
int team_size(int wish);

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
