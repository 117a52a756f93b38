#include "pool.h"

#include "members.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace slipstream {
namespace {

// About 20 us: long enough to catch the next call of a loop, short enough not to disturb torch's own threads.
constexpr int kIdleSpins = 500;
// Within a job the other threads are working; after this many spins, yield the processor to the thread that
// keeps them from it.
constexpr int kMeetSpins = 4000;
// From when on such a wait is watched.
constexpr Nanoseconds kLong = 200000;
// How long to wait for an announced job: several times what the interpreter needs between announcement and
// job.
constexpr std::chrono::microseconds kExpected(300);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

int allowed_processors() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        return CPU_COUNT(&set);
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

// Ends the work of a thread on a job in which it takes no part any more.
struct Left {};

// The seat of a worker in its own thread, and what a thread has that calls jobs.
thread_local Seat* own_seat = nullptr;
thread_local Seat callers_seat;

struct Job {
    Body body = nullptr;
    void* context = nullptr;
    Team* team = nullptr;
};

class Pool {
public:
    // Reserves the workers for one job. Returns the number of threads including the caller's, or 0 while
    // another job holds the workers.
    int hold(int threads) {
        if (busy_.exchange(true, std::memory_order_acquire))
            return 0;
        grow(threads - 1);
        return members_.workers() < threads - 1 ? members_.workers() + 1 : threads;
    }

    void let_go() { busy_.store(false, std::memory_order_release); }

    // Called only by the holder of the workers.
    void run(Body body, void* context, int threads) {
        const int helpers = members_.present(threads) - 1;
        Team team(threads, &members_, threads - 1 - helpers);
        if (helpers) {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = {body, context, &team};
            members_.begin(ticket_.load(std::memory_order_relaxed) + 1, helpers, callers_seat);
            ticket_.fetch_add(1, std::memory_order_release);
        }
        if (helpers)
            wake_.notify_all();
        body(context, team, 0);
        for (int i = 0; !members_.is_over(helpers); ++i) {
            if (i < kMeetSpins)
                pause();
            else
                std::this_thread::yield();
        }
        if (helpers)
            members_.end();
    }

    // A worker that misses this is woken by the job itself.
    void rouse() {
        if (members_.is_alone())
            return;
        announced_.fetch_add(1, std::memory_order_release);
        wake_.notify_all();
    }

    void crowd(int barrier) { members_.crowd(barrier); }

private:
    // Workers are never joined: they are parked when the process exits, and the pool outlives every static
    // object.
    void grow(int count) {
        while (members_.workers() < count) {
            Seat& seat = members_.add();
            try {
                std::thread(&Pool::work, this, &seat, members_.workers(), ticket_.load()).detach();
            } catch (const std::exception&) {
                members_.drop();
                return; // the system gives no more threads; the job runs on fewer
            }
        }
    }

    void work(Seat* seat, int rank, unsigned seen) {
        own_seat = seat;
        seat->delay.start();
        for (unsigned heard = announced_.load();;) {
            spin(seen, kIdleSpins);
            Job job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] {
                    return ticket_.load(std::memory_order_relaxed) != seen ||
                           announced_.load(std::memory_order_relaxed) != heard;
                });
                heard = announced_.load(std::memory_order_relaxed);
                if (ticket_.load(std::memory_order_relaxed) == seen) {
                    lock.unlock();
                    expect(seen);
                    continue;
                }
                seen = ticket_.load(std::memory_order_relaxed);
                job = job_;
            }
            if (!seat->join(seen))
                continue;
            try {
                job.body(job.context, *job.team, rank);
            } catch (const Left&) {
            }
            seat->mark.store(uint64_t{seen} << 3 | kDone, std::memory_order_release);
        }
    }

    // Spins until there is a job other than `seen` (returns true), or `times` times (returns false).
    bool spin(unsigned seen, int times) const {
        for (int i = 0; i < times; ++i) {
            if (ticket_.load(std::memory_order_acquire) != seen)
                return true;
            pause();
        }
        return false;
    }

    void expect(unsigned seen) const {
        const auto end = std::chrono::steady_clock::now() + kExpected;
        while (!spin(seen, 64) && std::chrono::steady_clock::now() < end)
            continue;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    Job job_;
    Members members_;
    std::atomic<unsigned> ticket_{0}, announced_{0};
    // Not a mutex: a thread must not try to lock a mutex that it already holds, and a job may call code that
    // requests another job.
    std::atomic<bool> busy_{false};
};

std::atomic<Pool*> pool{nullptr};

// After a fork the child has none of its parent's threads, so it gets a new pool.
Pool& instance() {
    Pool* now = pool.load(std::memory_order_acquire);
    if (now)
        return *now;
    static std::once_flag once;
    std::call_once(once, [] {
#ifdef __linux__
        pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool, std::memory_order_release); });
#endif
    });
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(now, fresh))
        return *fresh;
    delete fresh;
    return *now;
}

} // namespace

Team::Team(int size, Members* members, int absent)
    : size_(size), members_(members), arrived_(absent), absent_(absent), absent_first_(absent) {}

int Team::size() const {
    return size_;
}

bool Team::has(int rank) const {
    return members_ ? members_->has(rank) : rank == 0;
}

int64_t Team::take(int64_t grain) {
    return next_.fetch_add(grain, std::memory_order_relaxed);
}

bool Team::take_run(int rank, int64_t count, int64_t grain, int64_t* begin, int64_t* end) {
    constexpr int kShift = 36; // items are fewer than 2^31
    const uint64_t phase = (uint64_t{phase_.load(std::memory_order_relaxed)} + 1) << kShift;
    const int runs = size_ < kMostRuns ? size_ : kMostRuns;
    const int64_t pieces = (count + grain - 1) / grain, length = (pieces + runs - 1) / runs * grain;
    for (int i = 0; i < runs; ++i) {
        const int run = (rank + i) % runs;
        const int64_t first = run * length, last = first + length < count ? first + length : count;
        uint64_t mark = runs_[run].mark.load(std::memory_order_relaxed), at;
        do {
            at = mark >> kShift == phase >> kShift ? mark - phase : 0;
            if (first + static_cast<int64_t>(at) >= last)
                break;
        } while (!runs_[run].mark.compare_exchange_weak(mark, phase + at + static_cast<uint64_t>(grain),
                                                        std::memory_order_relaxed));
        *begin = first + static_cast<int64_t>(at);
        *end = *begin + grain < last ? *begin + grain : last;
        if (*begin < last)
            return true;
    }
    return false;
}

void Team::meet() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (size_ == 1)
        return close(phase);
    if (!arrive(phase))
        wait(phase);
    if (absent_.load(std::memory_order_relaxed) != absent_first_ && own_seat && own_seat->state() == kLeaving)
        throw Left();
}

// Returns whether this was the last to arrive, and the next phase has begun.
bool Team::arrive(unsigned phase) {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != size_)
        return false;
    close(phase);
    return true;
}

// Only the last to arrive is here: the others wait.
void Team::close(unsigned phase) {
    if (members_ && members_->wants_fewer(phase + 1) && members_->send_away(size_))
        absent_.fetch_add(1, std::memory_order_relaxed);
    arrived_.store(absent_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
}

void Team::wait(unsigned phase) {
    const auto waits = [&] { return phase_.load(std::memory_order_acquire) == phase; };
    for (int i = 0; i < kMeetSpins; ++i) {
        if (!waits())
            return;
        pause();
    }
    const Nanoseconds from = now();
    bool watches = false, counted_out = false;
    while (waits()) {
        std::this_thread::yield();
        if (!watches)
            watches = now() - from > kLong && members_->watch(size_);
        else if (!counted_out && members_->watched_for() > members_->patience())
            for (int i = members_->count_out(size_); i > 0; --i) {
                counted_out = true;
                absent_.fetch_add(1, std::memory_order_relaxed);
                arrive(phase);
            }
    }
    if (watches)
        members_->unwatch(size_, counted_out);
}

int team_size(int wish) {
    const int most = allowed_processors();
    return wish < 1 ? 1 : (wish > most ? most : wish);
}

void rouse() {
    instance().rouse();
}

void crowd(int barrier) {
    instance().crowd(barrier);
}

Crew::Crew(int threads) {
    if (threads < 2)
        return;
    Pool& found = instance();
    const int size = found.hold(threads);
    if (!size)
        return;
    pool_ = &found;
    size_ = size;
}

Crew::~Crew() {
    if (pool_)
        static_cast<Pool*>(pool_)->let_go();
}

int Crew::size() const {
    return size_;
}

void Crew::run(Body body, void* context) const {
    if (pool_)
        return static_cast<Pool*>(pool_)->run(body, context, size_);
    Team alone(1);
    body(context, alone, 0);
}

void run(Body body, void* context, int threads) {
    Crew(threads).run(body, context);
}

} // namespace slipstream
