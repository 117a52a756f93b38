// AVX-512 without further extensions.
#include "isa_avx512.h"

namespace slipstream {
constexpr Kernels kAvx512 =
    table(); // a compile-time constant: no code of this unit runs when the library is loaded
}
