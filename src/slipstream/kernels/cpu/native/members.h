// Which threads of the pool take part in a job, and how many are worth having while other processes want the
// processors, too. Included by pool.cpp only.
//
// A team waits at every barrier for its slowest thread. On a processor that another process uses, a thread is
// away for milliseconds at a time, and a step has a hundred barriers: with one busy process beside two
// threads on two processors, a decode step took 22 times as long, where one thread takes twice as long.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#include <time.h>
#endif

namespace slipstream {

using Nanoseconds = int64_t;

inline Nanoseconds now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The processor time of one thread, which any thread may read.
class ThreadClock {
public:
    // To be called by the thread itself.
    void start() {
#ifdef __linux__
        works_ = pthread_getcpuclockid(pthread_self(), &id_) == 0;
#endif
    }

    // Returns -1 where the system has no such clock.
    Nanoseconds read() const {
#ifdef __linux__
        timespec t;
        if (works_ && clock_gettime(id_, &t) == 0)
            return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
#endif
        return -1;
    }

private:
#ifdef __linux__
    clockid_t id_ = {};
    bool works_ = false;
#endif
};

// How many threads are worth having. A stall is time in which threads of a team wait for one that has no
// processor. One thread less costs 1 / threads of the speed, so it is worth it when stalls take more than
// that of the time. More are tried again after a pause, which doubles while that goes wrong.
class Crowding {
public:
    // The number of threads for the next job, of at most `wish`.
    int present(int wish) {
        int limit = limit_.load(std::memory_order_relaxed);
        if (!limit || limit >= wish)
            return wish;
        if (const Nanoseconds time = now(); time >= retry_at_) {
            const int more = (wish - limit) / 2;
            limit += more ? more : 1;
            limit_.store(limit, std::memory_order_relaxed);
            retried_at_ = time;
            retry_at_ = time + pause_;
            stalled_ = since_ = 0;
        }
        return limit < wish ? limit : wish;
    }

    // Whether the next job will have only one thread, unless more are to be tried again. Any thread may ask.
    bool is_alone() const { return limit_.load(std::memory_order_relaxed) == 1; }

    // Takes note of a wait that ends now, in a job that has run for `elapsed`. Returns whether to go on with
    // one thread less. A thread that leaves is lost to the rest of the job, of which nothing is known but
    // that long ones tend to go on for long: the longer it has run, the longer the stalls must be.
    bool note(int threads, Nanoseconds time, Nanoseconds elapsed, Nanoseconds waited, bool stalled) {
        const Nanoseconds shortest = elapsed / 8 > kShortest ? elapsed / 8 : kShortest;
        if (time - since_ > 3 * shortest) {
            since_ = time - waited;
            stalled_ = 0;
        }
        stalled_ += stalled ? waited : 0;
        const Nanoseconds all = time - since_ > shortest ? time - since_ : shortest;
        if (threads < 2 || stalled_ * threads < all)
            return false;
        pause_ = time - retried_at_ < 4 * pause_ ? 2 * pause_ : kPause;
        pause_ = pause_ < kLongestPause ? pause_ : kLongestPause;
        limit_.store(threads - 1, std::memory_order_relaxed);
        retry_at_ = time + pause_;
        stalled_ = since_ = 0;
        return true;
    }

private:
    // A process that runs for a time slice of 3 ms now and then is not worth a thread.
    static constexpr Nanoseconds kShortest = 12000000;
    static constexpr Nanoseconds kPause = 10000000, kLongestPause = 1000000000;

    std::atomic<int> limit_{0}; // 0: none
    Nanoseconds since_ = 0, stalled_ = 0, pause_ = kPause, retry_at_ = 0, retried_at_ = -kLongestPause;
};

// Where a worker is with a job. Nobody waits for one that has not begun, and it will not begin once it is
// counted out; one that has begun leaves at a barrier.
enum State : uint64_t { kDone, kInvited, kJoined, kOut, kLeaving };

struct alignas(64) Seat {
    std::atomic<uint64_t> mark{kDone}; // with the number of the job in the upper bits
    ThreadClock clock;

    State state() const { return static_cast<State>(mark.load(std::memory_order_acquire) & 7); }

    bool is_in() const {
        const State s = state();
        return s == kInvited || s == kJoined;
    }

    bool change(State from, State to) {
        uint64_t was = mark.load(std::memory_order_relaxed);
        return (was & 7) == from &&
               mark.compare_exchange_strong(was, (was & ~uint64_t{7}) | to, std::memory_order_acq_rel);
    }

    // Returns whether the worker takes part in this job.
    bool join(unsigned job) {
        uint64_t invited = uint64_t{job} << 3 | kInvited;
        return mark.compare_exchange_strong(invited, uint64_t{job} << 3 | kJoined, std::memory_order_acq_rel);
    }
};

// The workers of a pool. Except for `watch`, to be called by the pool's holder, by the one thread that closes
// a barrier, or by the one that watches.
class Members {
public:
    Seat& add() {
        seats_.push_back(std::make_unique<Seat>());
        return *seats_.back();
    }
    void drop() { seats_.pop_back(); }
    int workers() const { return static_cast<int>(seats_.size()); }

    bool has(int rank) const { return rank == 0 || seats_[at(rank)]->is_in(); }

    void begin(unsigned job, int workers) {
        caller_.start();
        begun_ = now();
        fewer_.store(false, std::memory_order_relaxed);
        for (int rank = 1; rank <= workers; ++rank)
            seats_[at(rank)]->mark.store(uint64_t{job} << 3 | kInvited, std::memory_order_release);
    }

    void end() { last_ = now() - begun_; }

    // How long to wait for workers that have not begun: at most what the job would lose without them, which
    // is about the time that the last one took.
    Nanoseconds patience() const {
        constexpr Nanoseconds kLeast = 500000, kMost = 20000000;
        return last_ < kLeast ? kLeast : (last_ < kMost ? last_ : kMost);
    }

    // Whether nobody works on the job any more; workers that have not begun do not count.
    bool is_over(int workers) {
        for (int rank = 1; rank <= workers; ++rank) {
            Seat& seat = *seats_[at(rank)];
            seat.change(kInvited, kOut);
            if (seat.state() != kDone && seat.state() != kOut)
                return false;
        }
        return true;
    }

    // Counts out the workers that have not begun; returns how many.
    int count_out(int size) {
        int some = 0;
        for (int rank = 1; rank < size; ++rank)
            some += seats_[at(rank)]->change(kInvited, kOut);
        return some;
    }

    // Makes one worker leave; returns whether there was one.
    bool send_away(int size) {
        for (int rank = size - 1; rank > 0; --rank)
            if (seats_[at(rank)]->change(kJoined, kLeaving))
                return true;
        return false;
    }

    // Whether one worker should leave at the barrier that begins `phase`.
    bool wants_fewer(unsigned phase) {
        if (fewer_.load(std::memory_order_relaxed)) {
            fewer_.store(false, std::memory_order_relaxed);
            return true;
        }
        return static_cast<int>(phase) == crowded_from_.load(std::memory_order_relaxed);
    }

    int present(int wish) {
        return crowded_from_.load(std::memory_order_relaxed) == 0 ? 1 : crowding_.present(wish);
    }

    bool is_alone() const { return crowding_.is_alone(); }

    void crowd(int barrier) { crowded_from_.store(barrier, std::memory_order_relaxed); }

    // One thread at a time watches for stalls.
    bool watch() { return !watched_.exchange(true, std::memory_order_acquire); }
    void unwatch() { watched_.store(false, std::memory_order_release); }

    struct Look {
        Nanoseconds time = 0, used = 0;
        int threads = 0; // 0 where the system does not tell
    };

    // The time, and the processor time that the threads of the team have used.
    Look look(int size) const {
        Look l;
        l.time = now();
        for (int rank = 0; rank < size; ++rank) {
            if (!has(rank))
                continue;
            const Nanoseconds used = (rank ? seats_[at(rank)]->clock : caller_).read();
            if (used < 0)
                return {l.time, 0, 0};
            l.used += used;
            ++l.threads;
        }
        return l;
    }

    // Takes note of a wait between two looks.
    void note(const Look& from, const Look& to) {
        if (!from.threads || from.threads != to.threads)
            return;
        const Nanoseconds waited = to.time - from.time, lacking = waited * to.threads - (to.used - from.used);
        if (crowding_.note(to.threads, to.time, to.time - begun_, waited, lacking > waited / 2))
            fewer_.store(true, std::memory_order_relaxed);
    }

private:
    static size_t at(int rank) { return static_cast<size_t>(rank - 1); }

    std::vector<std::unique_ptr<Seat>> seats_;
    ThreadClock caller_;
    Crowding crowding_;
    Nanoseconds begun_ = 0, last_ = 0; // when the job began, and what the one before it took
    std::atomic<bool> fewer_{false}, watched_{false};
    std::atomic<int> crowded_from_{-1};
};

} // namespace slipstream
