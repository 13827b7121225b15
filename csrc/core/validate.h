// The one place where a request becomes a valid problem or an Error. Nothing is read or written before it has passed.
#pragma once

#include "core/integers.h"
#include "core/problem.h"

namespace flash_attn {

/// Shapes, dtypes and scalars of the inputs; on the CPU also the contents of cu_seqlens and rng_state.
Problem validate(const AttentionProblem& request);
ForwardProblem validate(const ForwardArgs& args);
CacheProblem validate(const CacheArgs& args);
/// Everything but the results, which stay unset.
CacheProblem validate_inputs(const CacheArgs& args);
BackwardProblem validate(const BackwardArgs& args);

/// Contents of cumulative lengths, which the host can read: from 0, not decreasing, up to `total` rows of the tensor
/// `total_of`, none longer than `longest`, the argument `max_name`.
void check_lengths(const char* name, const Integers& cu_seqlens, std::int64_t total, const char* total_of,
                   std::int64_t longest, const char* max_name);

}  // namespace flash_attn
