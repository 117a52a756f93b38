// AMX: products of tiles of bfloat16; everything else as with AVX-512 and products of bfloat16.
#define SLIPSTREAM_BF16_DOT 1
#define SLIPSTREAM_AMX 1
#include "isa_avx512.h"

namespace slipstream {
// Known at compile time: nothing of this unit runs when the library is loaded.
#ifdef SLIPSTREAM_EMULATE_AMX
constexpr Kernels kAmxEmulated = table();
#else
constexpr Kernels kAmx = table();
#endif
} // namespace slipstream
