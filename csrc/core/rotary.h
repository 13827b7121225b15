// Rotary position embedding as backends are asked for it. flash_attn/rotary.h says what it is.
#pragma once

#include "core/integers.h"
#include "core/problem.h"
#include "flash_attn/rotary.h"

namespace flash_attn {

struct RotaryProblem {
  DType dtype = DType::f32;
  Device device = Device::cpu;
  index_t B = 0, rows = 0, H = 0, D = 0;  // rows: S of each sequence; packed: B is 1 and these are all T.
  Operand x, out;
  Rotary rotary;
  index_t offset = 0;
  Integers offsets, cu_seqlens;  // Of sequences, packed or not.
};

/// Of dense or packed tensors; `rotary` is null where there is no rotation.
RotaryProblem validate(const RotaryArgs& args);
/// The tables of a tensor with D features; messages use these names.
Rotary resolve_rotary_tables(const char* cos_name, const TensorView& cos, const char* sin_name, const TensorView& sin,
                             index_t D);

}  // namespace flash_attn
