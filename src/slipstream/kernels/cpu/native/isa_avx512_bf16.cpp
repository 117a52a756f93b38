// AVX-512 with bfloat16 products (BF16), byte products (VNNI) and byte permutations (VBMI).
#define SLIPSTREAM_BF16_DOT 1
#include "isa_avx512.h"

namespace slipstream {
constexpr Kernels kAvx512Bf16 =
    table(); // a compile-time constant: no code of this unit runs when the library is loaded
}
