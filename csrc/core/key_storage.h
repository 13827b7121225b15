// Validation of where keys and values are stored: pages, cache rows, lengths, padding; and of a call that appends to
// them.
#pragma once

#include "core/problem.h"

namespace flash_attn {

/// What messages call the arguments.
struct KeyNames {
  const char* k = "k";
  const char* v = "v";
  const char* used = "seqused_k";
  const char* leftpad = "leftpad_k";
};

// Rows of a tensor of (batch,) row, head, feature.
inline Operand operand(const TensorView& t) {
  if (t.ndim == 4) return {t.data, t.strides[0], t.strides[1], t.strides[2]};
  return {t.data, 0, t.strides[0], t.strides[1]};
}

/// Everything of a problem. `appended`: new keys per sequence, which count.
Problem resolve_problem(const AttentionProblem& request, const KeyNames& names, index_t appended);
/// out, lse and s_dmask of a forward pass whose problem is valid.
void resolve_results(const ForwardArgs& args, ForwardProblem& forward);
/// Sizes of `problem` are known already; those of paged keys are completed here.
void resolve_key_storage(const AttentionProblem& request, const KeyNames& names, index_t appended, Problem& problem);

}  // namespace flash_attn
