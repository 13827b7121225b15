// Attention over a cache on torch tensors, for the operator and the pybind11 module.
#pragma once

#include "call.h"

namespace flash_attn::torch_binding {

/// Arguments of flash_attn::CacheArgs; of `call`, k and v are the caches and seqused_k is cache_seqlens.
struct CacheCall {
  Call call;
  at::Tensor k_new, v_new, rotary_cos, rotary_sin;
  bool rotary_interleaved = true;
};

/// Appends in place, then attends; `out` is allocated if undefined. No autograd. s_dmask stays undefined.
ForwardResult forward_with_cache(const CacheCall& cache, const at::Tensor& out = {});

/// The caches are never copied; the other tensors are where their last stride is not 1.
CacheCall with_contiguous_rows(CacheCall cache);

Explanation explain(const CacheCall& cache);

}  // namespace flash_attn::torch_binding
