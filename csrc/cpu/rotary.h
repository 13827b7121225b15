// Rotary position embedding of rows, and of whole tensors.
#pragma once

#include <type_traits>

#include "core/numeric.h"
#include "core/rotary.h"

namespace flash_attn::cpu {

// Heads of one row: head h begins at data + h * stride.
template <class T>
struct Heads {
  T* data;
  index_t stride;
};

/// The row at `position`; features that do not turn are copied, all of them where the tables have no such position.
/// out may be x.
template <class T>
using RotateRow = void (*)(const Rotary& r, index_t position, Heads<const T> x, Heads<T> out, index_t heads,
                           index_t features);

/// Those of an instruction set. All give the same bits.
struct Rotations {
  RotateRow<Half> f16;
  RotateRow<BFloat16> bf16;
  RotateRow<float> f32;
  RotateRow<double> f64;

  template <class T>
  RotateRow<T> of() const {
    if constexpr (std::is_same_v<T, Half>) return f16;
    if constexpr (std::is_same_v<T, BFloat16>) return bf16;
    if constexpr (std::is_same_v<T, float>) return f32;
    if constexpr (std::is_same_v<T, double>) return f64;
  }
};

const Rotations& portable_rotations();
#if defined(FLASH_ATTN_X86)
const Rotations& avx2_rotations();
const Rotations& avx512_rotations();
#endif
#if defined(FLASH_ATTN_ARM64)
const Rotations& neon_rotations();
#endif

/// Elements that are worth handing to a thread.
inline constexpr index_t kRotatedPerTask = 16384;

void rotate(const RotaryProblem& problem, const Rotations& rotations, const Executor& executor);

}  // namespace flash_attn::cpu
