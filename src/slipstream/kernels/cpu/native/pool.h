// The threads: one team runs one job at a time; between jobs the workers spin briefly and then park.
#pragma once

#include <atomic>
#include <cstdint>

namespace slipstream {

// The threads of one running job. Every member is defined in pool.cpp, which is compiled for any processor:
// nothing here may be inlined into a unit of one instruction set and then be shared by the linker with
// another.
class Team {
public:
    explicit Team(int size) : size_(size) {}

    int size() const;

    // The next `grain` items that nobody has taken; the caller stops once the answer reaches the count.
    int64_t take(int64_t grain);

    // The same where items lie one after another in memory: each thread has a run of its own and goes through
    // it piece by piece; one that is done goes on in another's. False once all is taken.
    bool take_run(int rank, int64_t count, int64_t grain, int64_t* begin, int64_t* end);

    // Waits for all threads of the team; then no item is taken any more.
    void meet();

private:
    // How much of a run is taken, above the number of the phase that it was taken in: what an earlier phase
    // left counts as nothing, and nobody has to clear it.
    struct alignas(64) Taken {
        std::atomic<uint64_t> mark{0};
    };
    static constexpr int kMostRuns = 16; // more threads share them

    const int size_;
    Taken runs_[kMostRuns];
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

using Body = void (*)(void* context, Team& team, int rank);

// How many threads `run` would use at most for this wish: no more than this process may run at once.
int team_size(int wish);

// Announces a job: workers that are parked get up, which takes tens of microseconds, and wait for it a
// moment.
void rouse();

// The threads of one job, which are held while this is there: as many as it asks for (from team_size), fewer
// where the machine gives no more, or the calling thread alone while another job has the others. Scratch is
// counted for that many: fewer threads may need more of it.
class Crew {
public:
    explicit Crew(int threads);
    ~Crew();
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    int size() const;

    // Runs `body` on all of them, the calling one among them, and returns when they are done.
    void run(Body body, void* context) const;

private:
    void* pool_ = nullptr; // null: alone
    int size_ = 1;
};

// Runs `body` on a crew of so many threads.
void run(Body body, void* context, int threads);

} // namespace slipstream
