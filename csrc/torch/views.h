// From torch's tensors to the core's views.
#pragma once

#include <ATen/core/Tensor.h>
#include <flash_attn/attention.h>

#include <algorithm>

#include "devices.h"

namespace flash_attn::torch_binding {

/// Raises unless `tensor` is plain strided memory on a device that a backend of this build computes on.
inline void check_plain(const at::Tensor& tensor, const char* name) {
  check_device(tensor.device(), name);
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_nested(), "flash_attn: ", name,
                              " has layout ", tensor.layout(), tensor.is_nested() ? " (nested)" : "",
                              "; accepted: dense strided tensors, or varlen attention with cu_seqlens");
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_quantized(), "flash_attn: ", name, " is a quantized tensor; pass ", name,
                              ".dequantize()");
  TORCH_CHECK(!tensor.is_neg(), "flash_attn: ", name, " is a lazily negated view; pass ", name, ".resolve_neg()");
}

inline DType core_dtype(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kInt: return DType::i32;
    case at::kLong: return DType::i64;
    case at::kBool: return DType::boolean;
    default:
      TORCH_CHECK(
          false, "flash_attn: ", name, " has dtype ", tensor.scalar_type(),
          "; accepted: float16, bfloat16, float32 and float64, int32 for lengths, bool for masks, int64 for rng_state");
  }
}

/// View of `tensor`, which must be on the device of q, or of what messages are to name instead. An undefined tensor
/// gives a view that is not given.
inline TensorView view(const at::Tensor& tensor, const char* name, at::Device device, const char* device_of = "q") {
  TensorView result;
  if (!tensor.defined()) return result;
  TORCH_CHECK(tensor.device() == device, "flash_attn: ", name, " is on ", tensor.device(), " and ", device_of,
              " is on ", device, "; all tensors of a call must be on one device");
  check_plain(tensor, name);
  const auto ndim = tensor.dim();
  const auto max_ndim = static_cast<std::int64_t>(result.sizes.size());
  TORCH_CHECK(ndim >= 1 && ndim <= max_ndim, "flash_attn: ", name, " must have 1 to ", max_ndim,
              " dimensions, got shape ", tensor.sizes());
  result.data = tensor.data_ptr();
  TORCH_CHECK(
      result.data != nullptr || tensor.numel() == 0, "flash_attn: ", name,
      " holds no memory (a fake tensor or a wrapper subclass); call the operators torch.ops.flash_attn.* instead");
  result.dtype = core_dtype(tensor, name);
  result.device = core_device(tensor.device());
  result.ndim = static_cast<int>(ndim);
  std::copy_n(tensor.sizes().begin(), ndim, result.sizes.begin());
  std::copy_n(tensor.strides().begin(), ndim, result.strides.begin());
  return result;
}

}  // namespace flash_attn::torch_binding
