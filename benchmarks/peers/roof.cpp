// What this machine can do at best, as one line of JSON: `roof THREADS`.
//   read      GB/s that all threads together read from memory, each through 256 MiB of its own
//   float32   TFLOP/s of fused multiply-adds on registers
//   bfloat16  TFLOP/s of dot products on registers: AMX tiles where the processor has them, else AVX-512
//   int8      TOP/s, likewise
// A rate that the processor has no instruction for is null. Built for the machine that it runs on.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define KEEP(value) "+v"(value)
#elif defined(__x86_64__)
#define KEEP(value) "+x"(value)
#else
#define KEEP(value) "+w"(value)
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Words = std::uint64_t __attribute__((vector_size(64)));

// As wide as a register: a wider one would be kept in several.
#if defined(__AVX512F__)
using Floats = float __attribute__((vector_size(64)));
#elif defined(__AVX__)
using Floats = float __attribute__((vector_size(32)));
#else
using Floats = float __attribute__((vector_size(16)));
#endif

constexpr std::size_t kBytes = std::size_t{256} << 20;
constexpr long kTurns = 1 << 21;
constexpr int kSums = 13; // independent sums: more than latency times throughput, fewer than registers

std::atomic<std::uint64_t> sink{0};

// Runs `work(thread)` on all threads at once and returns the seconds until the last one is done.
template <class Work>
double together(int threads, const Work& work) {
    std::atomic<int> waiting{threads};
    std::atomic<bool> go{false};
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t)
        team.emplace_back([&, t] {
            waiting.fetch_sub(1);
            while (!go.load(std::memory_order_acquire)) {
            }
            work(t);
        });
    while (waiting.load() > 0) {
    }
    const auto start = Clock::now();
    go.store(true, std::memory_order_release);
    for (auto& thread : team)
        thread.join();
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double read_rate(int threads) {
    std::vector<Words*> data(threads);
    for (auto& part : data) {
        part = static_cast<Words*>(std::aligned_alloc(std::size_t{2} << 20, kBytes));
        if (part == nullptr)
            return 0;
        madvise(part, kBytes, MADV_HUGEPAGE);
    }
    const auto fill = [&](int t) {
        for (std::size_t i = 0; i < kBytes / sizeof(Words); ++i)
            data[t][i] = Words{} + i;
    };
    const auto read = [&](int t) {
        Words sum[8] = {};
        for (std::size_t i = 0; i < kBytes / sizeof(Words); i += 8)
            for (std::size_t j = 0; j < 8; ++j)
                sum[j] += data[t][i + j];
        for (const auto& each : sum)
            sink += each[0] + each[7];
    };
    together(threads, fill);
    double least = 1e9;
    for (int i = 0; i < 4; ++i)
        least = std::min(least, together(threads, read));
    for (auto* part : data)
        std::free(part);
    return threads * static_cast<double>(kBytes) / least / 1e9;
}

// TOP/s of `work`, which does `operations` on each thread; the best of a few.
template <class Work>
double rate(int threads, double operations, const Work& work) {
    double least = 1e9;
    for (int i = 0; i < 4; ++i)
        least = std::min(least, together(threads, [&](int) { work(); }));
    return threads * operations / least / 1e12;
}

// Takes `step` of each of `kSums` registers in turn. Variables with names, for gcc 12 keeps some of an array
// in memory.
template <class Sum, class Step>
void on_registers(const Step& step) {
    Sum a = {}, b = {}, c = {}, d = {}, e = {}, f = {}, g = {}, h = {}, i = {}, j = {}, k = {}, l = {},
        m = {};
    for (long turn = 0; turn < kTurns; ++turn) {
        a = step(a), b = step(b), c = step(c), d = step(d), e = step(e);
        f = step(f), g = step(g), h = step(h), i = step(i), j = step(j);
        k = step(k), l = step(l), m = step(m);
        // Or the compiler would do it once.
        asm volatile("" : KEEP(a), KEEP(b), KEEP(c), KEEP(d), KEEP(e));
        asm volatile("" : KEEP(f), KEEP(g), KEEP(h), KEEP(i), KEEP(j));
        asm volatile("" : KEEP(k), KEEP(l), KEEP(m));
    }
    for (const Sum& each : {a, b, c, d, e, f, g, h, i, j, k, l, m})
        sink += static_cast<std::uint64_t>(each[0]);
}

// One instruction where there is one: tuned for some processors, gcc makes two of a sum of products.
Floats multiply_add(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)sum, (__m512)a, (__m512)b);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)sum, (__m256)a, (__m256)b);
#else
    return sum * a + b;
#endif
}

double float_rate(int threads) {
    return rate(threads, 2.0 * sizeof(Floats) / sizeof(float) * kSums * kTurns, [] {
        const Floats a = Floats{} + 0.5F, b = Floats{} + 0.25F;
        on_registers<Floats>([=](Floats sum) { return multiply_add(sum, a, b); });
    });
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Linux gives tile registers to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18).
bool tiles_allowed() {
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

struct alignas(64) TileShape {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void tiles_bfloat16() {
    const TileShape shape;
    _tile_loadconfig(&shape);
    for (long i = 0; i < kTurns / 16; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

void tiles_int8() {
    const TileShape shape;
    _tile_loadconfig(&shape);
    for (long i = 0; i < kTurns / 16; ++i) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
}
#endif

double bfloat16_rate(int threads) {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (tiles_allowed())
        return rate(threads, 2.0 * 4 * 16 * 16 * 32 * (kTurns / 16), tiles_bfloat16);
#endif
#if defined(__AVX512BF16__)
    return rate(threads, 2.0 * 32 * kSums * kTurns, [] {
        const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
        on_registers<__m512>([=](__m512 sum) { return _mm512_dpbf16_ps(sum, a, a); });
    });
#else
    (void)threads;
    return 0;
#endif
}

double int8_rate(int threads) {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (tiles_allowed())
        return rate(threads, 2.0 * 4 * 16 * 16 * 64 * (kTurns / 16), tiles_int8);
#endif
#if defined(__AVX512VNNI__)
    return rate(threads, 2.0 * 64 * kSums * kTurns, [] {
        const __m512i a = _mm512_set1_epi8(1);
        on_registers<__m512i>([=](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, a); });
    });
#else
    (void)threads;
    return 0;
#endif
}

std::string number(double value) {
    return value > 0 ? std::to_string(value) : "null";
}

} // namespace

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::atoi(arguments[1]) : 0;
    if (threads < 1 || threads > 1024) {
        std::fprintf(stderr, "roof: give the number of threads, 1 to 1024\n");
        return 2;
    }
    std::printf("{\"read\": %s, \"float32\": %s, \"bfloat16\": %s, \"int8\": %s}\n",
                number(read_rate(threads)).c_str(), number(float_rate(threads)).c_str(),
                number(bfloat16_rate(threads)).c_str(), number(int8_rate(threads)).c_str());
    return 0;
}
