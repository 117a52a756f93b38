// Which threads of the pool take part in a job, and how many are worth having while other processes want the
// processors, too. Included by pool.cpp only.
//
// A team waits at every barrier for its slowest thread. On a processor that another process uses, a thread is
// away for milliseconds at a time, and a step has a hundred barriers: with one busy process beside two
// threads on two processors, a decode step took 2 to 3 times as long, and more where more threads competed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#ifdef __linux__
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>
#endif

namespace slipstream {

using Nanoseconds = int64_t;

inline Nanoseconds now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// How long a thread has waited for a processor since it began, which any thread may read. A thread that waits
// for something else (a disk, Python's lock) does not count: others that leave would not help it.
class Delay {
public:
    Delay() = default;
    ~Delay() {
#ifdef __linux__
        if (file_ >= 0)
            close(file_);
#endif
    }
    Delay(const Delay&) = delete;
    Delay& operator=(const Delay&) = delete;

    // To be called by the thread itself, in each process that it finds itself in.
    void start() {
#ifdef __linux__
        const int process = getpid();
        if (process == process_)
            return;
        process_ = process;
        const int before = file_;
        file_.store(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC), std::memory_order_release);
        if (before >= 0)
            close(before);
#endif
    }

    // Returns -1 where the system does not tell. It takes 3 us.
    Nanoseconds read() const {
#ifdef __linux__
        char text[64] = {};
        const int file = file_.load(std::memory_order_acquire);
        if (file < 0 || pread(file, text, sizeof(text) - 1, 0) <= 0)
            return -1;
        const char* second = std::strchr(text, ' '); // time on a processor, time waiting for one, ...
        return second ? std::strtoll(second, nullptr, 10) : -1;
#else
        return -1;
#endif
    }

private:
    std::atomic<int> file_{-1};
    int process_ = 0;
};

// How many threads are worth having. A stall is time in which threads of a team wait for one that waits for a
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

    // Takes note of a wait that ends now, of which some time was a stall, in a job that has run for
    // `elapsed`. Returns whether to go on with one thread less. A thread that leaves is lost to the rest of
    // the job, of which nothing is known but that long ones tend to go on for long: the longer it has run,
    // the longer the stalls must be.
    bool note(int threads, Nanoseconds time, Nanoseconds elapsed, Nanoseconds waited, Nanoseconds stalled) {
        const Nanoseconds shortest = elapsed / 8 > kShortest ? elapsed / 8 : kShortest;
        if (time - since_ > 3 * shortest) {
            since_ = time - waited;
            stalled_ = 0;
        }
        stalled_ += stalled;
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
    Delay delay;
    Nanoseconds delayed = -1; // at the beginning of the wait that is being watched

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

    // `caller` is that of the calling thread.
    void begin(unsigned job, int workers, Seat& caller) {
        caller.delay.start();
        caller_ = &caller;
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
    bool watch(int size) {
        if (watched_.exchange(true, std::memory_order_acquire))
            return false;
        watched_from_ = now();
        each(size, [](Seat& seat) { seat.delayed = seat.delay.read(); });
        return true;
    }

    // Ends the watch. A wait for threads that were counted out is a stall as a whole.
    void unwatch(int size, bool counted_out) {
        const Nanoseconds time = now(), waited = time - watched_from_;
        Nanoseconds stalled = 0;
        int threads = 0;
        each(size, [&](Seat& seat) {
            const Nanoseconds delayed = seat.delay.read();
            stalled += seat.delayed >= 0 && delayed > seat.delayed ? delayed - seat.delayed : 0;
            ++threads;
        });
        stalled = counted_out || stalled > waited ? waited : stalled;
        const bool fewer = crowding_.note(threads + counted_out, time, time - begun_, waited, stalled);
        if (fewer && !counted_out)
            fewer_.store(true, std::memory_order_relaxed);
        watched_.store(false, std::memory_order_release);
    }

    Nanoseconds watched_for() const { return now() - watched_from_; }

private:
    static size_t at(int rank) { return static_cast<size_t>(rank - 1); }

    // Calls f(seat) for the threads that take part.
    template <class F>
    void each(int size, F f) {
        f(*caller_);
        for (int rank = 1; rank < size; ++rank)
            if (has(rank))
                f(*seats_[at(rank)]);
    }

    std::vector<std::unique_ptr<Seat>> seats_;
    Seat* caller_ = nullptr;
    Crowding crowding_;
    Nanoseconds watched_from_ = 0;
    Nanoseconds begun_ = 0, last_ = 0; // when the job began, and what the one before it took
    std::atomic<bool> fewer_{false}, watched_{false};
    std::atomic<int> crowded_from_{-1};
};

} // namespace slipstream
