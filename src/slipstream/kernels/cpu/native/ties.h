// The choice among equal scores.
#pragma once

#include <cstdint>

namespace slipstream {

// Sets all of n scores to `nothing` but the k that torch.topk chooses on a CPU. Among equal scores that
// depends on the order in which std::partial_sort and std::nth_element compare; they are called in the same
// way here. Compiled for any processor, as the linker keeps one copy of the standard library's functions.
// Source: torch's aten/src/ATen/native/TopKImpl.h.
void keep_top(float* scores, int64_t n, int64_t k, float nothing);

} // namespace slipstream
