// Validation of every call before any of its pointers is followed; the inputs may be arbitrary.
#pragma once

#include "abi.h"

namespace slipstream {

Status check(const LinearCall& call);
Status check(const FeedCall& call);
Status check(const ExpertsCall& call);
Status check(const DrawCall& call);
Status check(const NormCall& call);
Status check(const AttentionCall& call);
Status check(const PagedAttentionCall& call);
Status check(const StackCall& call);
Status check(const PackCall& call);
Status check(const SketchCall& call);
Status check(const TextCall& call);
Status check(const ModelCall& call);

} // namespace slipstream
