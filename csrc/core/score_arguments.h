// Validation of what adds to scores or hides them beyond causal, window and ALiBi: attn_bias, attn_mask, key_begin,
// key_end and learnable_sink.
#pragma once

#include "core/problem.h"

namespace flash_attn {

/// Sizes of `problem` are known already.
void resolve_score_arguments(const AttentionProblem& request, Problem& problem);
/// dbias and dsink of a backward pass whose problem is valid.
void resolve_score_gradients(const BackwardArgs& args, BackwardProblem& backward);

}  // namespace flash_attn
