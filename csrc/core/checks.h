// Checks that every part of validation is made of. Each throws Error, naming the argument, what was passed and what is
// accepted.
#pragma once

#include <initializer_list>
#include <limits>
#include <sstream>

#include "flash_attn/attention.h"

namespace flash_attn {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "flash_attn: ";
  (text << ... << parts);
  throw Error(text.str());
}

inline std::string list(const std::int64_t* values, int n) {
  std::string text = "(";
  for (int i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + ")";
}

inline std::string shape_of(const TensorView& t) { return list(t.sizes.data(), t.ndim); }

inline bool is_floating(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

inline DType lse_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

inline void check_dtype(const char* name, const TensorView& t, DType expected, const char* why) {
  if (t.dtype != expected) fail(name, " must have dtype ", to_string(expected), why, ", got ", to_string(t.dtype));
}

inline void check_shape(const char* name, const TensorView& t, std::initializer_list<std::int64_t> expected,
                        const char* letters) {
  bool same = t.ndim == static_cast<int>(expected.size());
  int d = 0;
  for (std::int64_t size : expected) same = same && t.sizes[d++] == size;
  if (!same)
    fail(name, " must have shape ", letters, " = ", list(expected.begin(), static_cast<int>(expected.size())), ", got ",
         shape_of(t));
}

// Of such a tensor libraries disagree about what the strides are.
inline bool has_no_elements(const TensorView& t) {
  for (int d = 0; d < t.ndim; ++d)
    if (t.sizes[d] == 0) return true;
  return false;
}

// So that no product of sizes overflows.
inline void check_sizes(const char* name, const TensorView& t) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 16;
  std::int64_t elements = 1;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.sizes[d] < 0 || (t.sizes[d] > 0 && elements > kMost / t.sizes[d]))
      fail(name, " must have a shape that memory can hold, got ", shape_of(t));
    elements *= t.sizes[d] > 0 ? t.sizes[d] : 1;
  }
}

inline void check_device(const char* name, const TensorView& t, Device device) {
  if (t.device != device)
    fail(name, " must be where q is, ", device == Device::cpu ? "in the CPU's memory" : "on the GPU",
         "; move it there");
}

inline void check_contiguous(const char* name, const TensorView& t) {
  if (has_no_elements(t)) return;
  std::int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] > 1 && t.strides[d] != stride)
      fail(name, " must be contiguous, got strides ", list(t.strides.data(), t.ndim), " for shape ", shape_of(t),
           "; pass ", name, ".contiguous()");
    stride *= t.sizes[d];
  }
}

inline void check_last_stride(const char* name, const TensorView& t) {
  if (has_no_elements(t)) return;
  if (t.sizes[t.ndim - 1] > 1 && t.strides[t.ndim - 1] != 1)
    fail(name, " must have a contiguous last dimension (stride 1), got strides ", list(t.strides.data(), t.ndim),
         "; pass ", name, ".contiguous()");
}

}  // namespace flash_attn
