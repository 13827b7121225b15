// Rotary position embedding of whole tensors, by rows.
#pragma once

#include "core/rotary.h"

namespace flash_attn::cpu {

void rotate(const RotaryProblem& problem, const Executor& executor);

}  // namespace flash_attn::cpu
