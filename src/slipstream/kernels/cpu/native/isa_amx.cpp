// AMX: products of bfloat16 and byte tiles; otherwise like AVX-512 with bfloat16 products.
#define SLIPSTREAM_BF16_DOT 1
#define SLIPSTREAM_AMX 1
#include "isa_avx512.h"

namespace slipstream {
// A compile-time constant: no code of this unit runs when the library is loaded.
#ifdef SLIPSTREAM_EMULATE_AMX
constexpr Kernels kAmxEmulated = table();
#else
constexpr Kernels kAmx = table();
#endif
} // namespace slipstream
