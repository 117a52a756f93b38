// Operations on whole tensors in one pass, at memory speed: no instruction set makes them faster.
#pragma once

#include "abi.h"

extern "C" {
// Copies between memory ranges that do not overlap. Writes bypass the caches: the data is not read soon, and
// lines that are overwritten completely need not be read first.
SLIPSTREAM_API int32_t slipstream_copy(int32_t threads, const void* from, void* to, int64_t bytes);
// Sets *finite to whether no element of a contiguous tensor is NaN or infinity.
SLIPSTREAM_API int32_t slipstream_finite(int32_t threads, const void* data, int64_t count, int32_t dtype,
                                         int32_t* finite);
// Computes a digest of `bytes` bytes; two different ranges have the same digest with a probability of 2^-64.
SLIPSTREAM_API int32_t slipstream_digest(int32_t threads, const void* data, int64_t bytes, uint64_t* digest);
}
