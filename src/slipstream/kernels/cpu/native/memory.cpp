#include "memory.h"

#include <cstring>

#ifdef SLIPSTREAM_X86
#include <emmintrin.h>
#endif

#include "pool.h"

namespace slipstream {
namespace {

constexpr int64_t kPiece = 256 << 10; // bytes that a thread claims at a time
constexpr int64_t kLine = 64;

// Copies with stores that bypass the caches; `to` is aligned to a cache line.
void copy_past_caches(const char* from, char* to, int64_t bytes) {
    int64_t i = 0;
#ifdef SLIPSTREAM_X86
    constexpr int64_t kAhead = 2 << 10; // prefetch distance in bytes
    for (; i + kLine <= bytes; i += kLine) {
        __builtin_prefetch(from + i + kAhead, 0, 0);
        for (int64_t j = i; j < i + kLine; j += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
    _mm_sfence();
#endif
    std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

// Whether any of the words [begin, end) has an exponent of all ones (NaN or infinity).
// Source: IEEE 754; bfloat16 is the upper half of float32.
template <class Word>
bool any_special(const void* data, int64_t begin, int64_t end, Word exponent) {
    const auto* words = static_cast<const Word*>(data);
    Word found = 0;
    for (int64_t i = begin; i < end; ++i)
        found = static_cast<Word>(found | ((words[i] & exponent) == exponent));
    return found != 0;
}

// Hashes eight words at a time in eight chains. Multiplying by an odd number and folding the upper half onto
// the lower are both invertible, so a change of a single word always changes the result.
uint64_t digest_of(const char* data, int64_t bytes, uint64_t seed) {
    constexpr uint64_t kTimes = 0x9e3779b97f4a7c15;
    const auto mixed = [](uint64_t x) {
        x *= kTimes;
        return x ^ (x >> 32);
    };
    uint64_t lanes[8], words[8];
    for (uint64_t i = 0; i < 8; ++i)
        lanes[i] = mixed(seed * 8 + i + 1);
    for (int64_t at = 0; at < bytes; at += kLine) {
        if (at + kLine <= bytes) {
            std::memcpy(words, data + at, kLine);
        } else {
            std::memset(words, 0, kLine);
            std::memcpy(words, data + at, static_cast<size_t>(bytes - at));
        }
        for (int i = 0; i < 8; ++i)
            lanes[i] = mixed(lanes[i] ^ words[i]);
    }
    uint64_t all = static_cast<uint64_t>(bytes);
    for (uint64_t lane : lanes)
        all = mixed(all ^ lane);
    return all;
}

struct Digest {
    const char* data;
    int64_t bytes;
    uint64_t all;
};

struct Copy {
    const char* from;
    char* to;
    int64_t bytes;
};

struct Scan {
    const void* data;
    int64_t count, size;
    uint32_t exponent;
    int32_t special;
};

} // namespace
} // namespace slipstream

using namespace slipstream;

extern "C" {

int32_t slipstream_copy(int32_t threads, const void* from, void* to, int64_t bytes) {
    if (bytes < 0)
        return kShape;
    if (!from || !to)
        return kNull;
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
    const int64_t head = past && bytes > kLine - past ? kLine - past : (past ? bytes : 0);
    std::memcpy(to, from, static_cast<size_t>(head));
    Copy copy = {static_cast<const char*>(from) + head, static_cast<char*>(to) + head, bytes - head};
    run(
        [](void* context, Team& team, int) {
            const auto& c = *static_cast<Copy*>(context);
            for (int64_t at; (at = team.take(kPiece)) < c.bytes;)
                copy_past_caches(c.from + at, c.to + at, c.bytes - at < kPiece ? c.bytes - at : kPiece);
            team.meet();
        },
        &copy, team_size(threads));
    return kOk;
}

int32_t slipstream_finite(int32_t threads, const void* data, int64_t count, int32_t dtype, int32_t* finite) {
    if (count < 0)
        return kShape;
    if (!data || !finite)
        return kNull;
    Scan scan = {data, count, dtype == kFloat32 ? 4 : 2, 0, 0};
    if (dtype == kFloat32)
        scan.exponent = 0x7f800000;
    else if (dtype == kBfloat16)
        scan.exponent = 0x7f80;
    else if (dtype == kFloat16)
        scan.exponent = 0x7c00;
    else
        return kDtype;
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(scan.size))
        return kAlignment;
    run(
        [](void* context, Team& team, int) {
            auto& s = *static_cast<Scan*>(context);
            const int64_t step = kPiece / s.size;
            for (int64_t at; (at = team.take(step)) < s.count;) {
                const int64_t end = s.count - at < step ? s.count : at + step;
                const bool special =
                    s.size == 4 ? any_special<uint32_t>(s.data, at, end, s.exponent)
                                : any_special<uint16_t>(s.data, at, end, static_cast<uint16_t>(s.exponent));
                if (special)
                    __atomic_store_n(&s.special, 1, __ATOMIC_RELAXED);
            }
            team.meet();
        },
        &scan, team_size(threads));
    *finite = !scan.special;
    return kOk;
}
int32_t slipstream_digest(int32_t threads, const void* data, int64_t bytes, uint64_t* digest) {
    if (bytes < 0)
        return kShape;
    if (!data || !digest)
        return kNull;
    Digest all = {static_cast<const char*>(data), bytes, 0};
    run(
        [](void* context, Team& team, int) {
            auto& d = *static_cast<Digest*>(context);
            for (int64_t at; (at = team.take(kPiece)) < d.bytes;) {
                const int64_t count = d.bytes - at < kPiece ? d.bytes - at : kPiece;
                const uint64_t piece = digest_of(d.data + at, count, static_cast<uint64_t>(at / kPiece));
                __atomic_fetch_add(&d.all, piece, __ATOMIC_RELAXED); // order does not matter
            }
            team.meet();
        },
        &all, team_size(threads));
    *digest = all.all;
    return kOk;
}
}
