// The public functions: select the instruction set, check the arguments, allocate scratch, run.
#include <cstdlib>
#include <cstring>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "check.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
    bool (*here)();
};

bool always() {
    return true;
}

#ifdef SLIPSTREAM_X86
// The compiler's own test, which checks the processor and whether the operating system saves the wide
// registers.
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#ifdef SLIPSTREAM_EMULATE_AVX512
[[maybe_unused]] bool has_avx512() {
    return has_avx2();
}
[[maybe_unused]] bool has_avx512_bf16() {
    return has_avx2();
}
#else
[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
// Cooper Lake has the bfloat16 dot products but lacks the byte permutations (VBMI); it runs as plain AVX-512.
[[maybe_unused]] bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif
// Linux enables the AMX tile state only for a process that requests it, once for all of its threads.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kAskForComponent = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kAskForComponent, kTileData) == 0;
#else
    return false;
#endif
}
[[maybe_unused]] bool has_amx() {
    static const bool here = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") &&
                             __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                             may_use_tiles();
    return here;
}
#endif

constexpr Isa kIsas[] = {
    {"baseline", &kBaseline, always},
#ifdef SLIPSTREAM_WITH_AVX2
    {"avx2", &kAvx2, has_avx2},
#endif
#ifdef SLIPSTREAM_WITH_AVX512
    {"avx512", &kAvx512, has_avx512},
#endif
#ifdef SLIPSTREAM_WITH_AVX512_BF16
    {"avx512bf16", &kAvx512Bf16, has_avx512_bf16},
#endif
#ifdef SLIPSTREAM_WITH_AMX
    {"amx", &kAmx, has_amx},
#endif
#ifdef SLIPSTREAM_WITH_AMX_EMULATED
    {"amx-emulated", &kAmxEmulated, has_avx512_bf16},
#endif
};
constexpr int32_t kNumIsas = sizeof(kIsas) / sizeof(kIsas[0]);

// The scratch memory of one calling thread, kept between its calls if it is at most `kKept` bytes.
class Arena {
public:
    ~Arena() { std::free(base_); }
    bool is_lent() const { return lent_; }
    char* lend(int64_t bytes) {
        lent_ = true;
        if (bytes > size_) {
            std::free(base_);
            size_ = 0;
            base_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
            if (base_)
                size_ = bytes;
        }
        return base_;
    }
    void end() {
        lent_ = false;
        if (size_ <= kKept)
            return;
        std::free(base_);
        base_ = nullptr;
        size_ = 0;
    }

private:
    static constexpr int64_t kKept = 16 << 20;
    char* base_ = nullptr;
    int64_t size_ = 0;
    bool lent_ = false;
};

template <class Call>
struct Work {
    const Call* call;
    char* scratch;
    void (*run)(const Call&, char*, Team&, int);
};

template <class Call>
int32_t start(int32_t isa, int32_t threads, const Call* call, int64_t (*Kernels::*bytes)(const Call&, int),
              void (*Kernels::*run_one)(const Call&, char*, Team&, int)) {
    if (isa < 0 || isa >= kNumIsas || !kIsas[isa].here())
        return kNoIsa;
    if (!call)
        return kNull;
    const Status status = check(*call);
    if (status != kOk)
        return status;
    const Kernels& kernels = *kIsas[isa].kernels;
    const Crew crew(team_size(threads));
    thread_local Arena kept;
    Arena own; // for a call that this thread makes from within another call
    Arena& arena = kept.is_lent() ? own : kept;
    Work<Call> work = {call, arena.lend((kernels.*bytes)(*call, crew.size())), kernels.*run_one};
    if (!work.scratch) {
        arena.end();
        return kMemory;
    }
    crew.run(
        [](void* context, Team& all, int rank) {
            const auto& w = *static_cast<Work<Call>*>(context);
            w.run(*w.call, w.scratch, all, rank);
        },
        &work);
    arena.end();
    return kOk;
}

} // namespace
} // namespace slipstream

using namespace slipstream;

extern "C" {

int32_t slipstream_abi() {
    return kAbi;
}

int32_t slipstream_isa(const char* name) {
    for (int32_t i = 0; name && i < kNumIsas; ++i)
        if (std::strcmp(kIsas[i].name, name) == 0 && kIsas[i].here())
            return i;
    return -1;
}

const char* slipstream_error(int32_t status) {
    static const char* const kSentences[] = {
        "no error",
        "the processor lacks this instruction set",
        "a tensor is missing",
        "a dtype is unknown",
        "shapes do not fit each other",
        "a tensor is not aligned to its element",
        "an index points outside of its tensor",
        "there is no memory for scratch",
        "an option is unknown to this library",
    };
    return status >= 0 && status <= kUnsupported ? kSentences[status] : "the status is unknown";
}

void slipstream_crowd(int32_t barrier) {
    crowd(barrier);
}

void slipstream_rouse() {
    rouse();
}

int32_t slipstream_linear(int32_t isa, int32_t threads, const LinearCall* call) {
    return start(isa, threads, call, &Kernels::linear_bytes, &Kernels::linear);
}

int32_t slipstream_feed(int32_t isa, int32_t threads, const FeedCall* call) {
    return start(isa, threads, call, &Kernels::feed_bytes, &Kernels::feed);
}

int32_t slipstream_experts(int32_t isa, int32_t threads, const ExpertsCall* call) {
    return start(isa, threads, call, &Kernels::experts_bytes, &Kernels::experts);
}

int32_t slipstream_draw(int32_t isa, int32_t threads, const DrawCall* call) {
    return start(isa, threads, call, &Kernels::draw_bytes, &Kernels::draw);
}

int32_t slipstream_norm(int32_t isa, int32_t threads, const NormCall* call) {
    return start(isa, threads, call, &Kernels::norm_bytes, &Kernels::norm);
}

int32_t slipstream_attention(int32_t isa, int32_t threads, const AttentionCall* call) {
    return start(isa, threads, call, &Kernels::attention_bytes, &Kernels::attention);
}

int32_t slipstream_paged_attention(int32_t isa, int32_t threads, const PagedAttentionCall* call) {
    return start(isa, threads, call, &Kernels::paged_attention_bytes, &Kernels::paged_attention);
}

int32_t slipstream_stack(int32_t isa, int32_t threads, const StackCall* call) {
    return start(isa, threads, call, &Kernels::stack_bytes, &Kernels::stack);
}

int32_t slipstream_text(int32_t isa, int32_t threads, const TextCall* call) {
    return start(isa, threads, call, &Kernels::text_bytes, &Kernels::text);
}

int32_t slipstream_pack(int32_t isa, int32_t threads, const PackCall* call) {
    return start(isa, threads, call, &Kernels::pack_bytes, &Kernels::pack);
}

int32_t slipstream_sketch(int32_t isa, int32_t threads, const SketchCall* call) {
    return start(isa, threads, call, &Kernels::sketch_bytes, &Kernels::sketch);
}

int32_t slipstream_model(int32_t isa, int32_t threads, const ModelCall* call) {
    return start(isa, threads, call, &Kernels::model_bytes, &Kernels::model);
}
}
