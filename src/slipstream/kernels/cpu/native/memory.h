// Whole tensors in one pass over them, at the rate of the memory: no instruction set makes that faster.
#pragma once

#include "abi.h"

extern "C" {
// Copies between places that do not overlap. What is written goes past the caches: nobody reads it soon, and
// lines that are overwritten whole need not be read before.
SLIPSTREAM_API int32_t slipstream_copy(int32_t threads, const void* from, void* to, int64_t bytes);
// Sets *finite to whether no element of a contiguous tensor is NaN or infinity.
SLIPSTREAM_API int32_t slipstream_finite(int32_t threads, const void* data, int64_t count, int32_t dtype,
                                         int32_t* finite);
// A number that differs, but for one chance in 2^64, where two runs of bytes do.
SLIPSTREAM_API int32_t slipstream_digest(int32_t threads, const void* data, int64_t bytes, uint64_t* digest);
}
