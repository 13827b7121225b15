// The little of HIP that the test kernels need, over compiler builtins: they compile without any ROCm header or
// library.
#pragma once

#define GLOBAL extern "C" __attribute__((global))
#define DEVICE static inline __attribute__((device, always_inline))
#define SHARED __attribute__((shared))
#define THREADS(n) __attribute__((amdgpu_flat_work_group_size(1, n)))

using f16 = _Float16;
using bf16 = __bf16;
using f16x2 = f16 __attribute__((ext_vector_type(2)));
using f16x4 = f16 __attribute__((ext_vector_type(4)));
using f16x8 = f16 __attribute__((ext_vector_type(8)));
using bf16x2 = bf16 __attribute__((ext_vector_type(2)));
using f16x16 = f16 __attribute__((ext_vector_type(16)));
using s16x4 = short __attribute__((ext_vector_type(4)));
using s16x8 = short __attribute__((ext_vector_type(8)));
using s16x16 = short __attribute__((ext_vector_type(16)));
using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));
using f32x8 = float __attribute__((ext_vector_type(8)));
using f32x16 = float __attribute__((ext_vector_type(16)));

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int block() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int lane() {
#if __GFX9__
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
#else
  return __builtin_amdgcn_mbcnt_lo(~0u, 0u);
#endif
}

DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
