// The one place where a request becomes a valid problem or an Error. Nothing is read or written before it has passed.
#pragma once

#include "core/problem.h"

namespace flash_attn {

/// Shapes, dtypes and scalars of the inputs; on the CPU also the contents of cu_seqlens and rng_state.
Problem validate(const AttentionProblem& request);
ForwardProblem validate(const ForwardArgs& args);
CacheProblem validate(const CacheArgs& args);
/// Everything but the results, which stay unset.
CacheProblem validate_inputs(const CacheArgs& args);
BackwardProblem validate(const BackwardArgs& args);

}  // namespace flash_attn
