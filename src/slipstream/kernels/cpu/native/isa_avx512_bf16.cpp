// AVX-512 with products of bfloat16 and of bytes (VNNI), and permutations of bytes (VBMI).
#define SLIPSTREAM_BF16_DOT 1
#include "isa_avx512.h"

namespace slipstream {
constexpr Kernels kAvx512Bf16 =
    table(); // known at compile time: nothing of this unit runs when the library is loaded
}
