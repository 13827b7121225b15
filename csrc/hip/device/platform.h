// What the kernels need of a GPU, over compiler builtins: no HIP or CUDA header, no device library.
//
// Compiles with clang for AMDGPU (`-x hip -nogpuinc -nogpulib`) and with nvcc. A wave is 64 lanes on CDNA, 32
// elsewhere.
#pragma once

#if defined(__AMDGCN__) || (defined(__HIP__) && !defined(__CUDACC__))
#define FA_AMD 1
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#else
#define FA_AMD 0
#endif

#include <type_traits>

#include "core/numeric.h"
#include "core/platform.h"

#define FA_DEVICE __device__ inline __attribute__((always_inline))
// A function that an AMD target lacks must not be parsed with bodies of builtins that it does not know.
#if FA_AMD && !defined(__AMDGCN__)
#error "kernels are compiled for the device only (--cuda-device-only)"
#endif

#if FA_AMD
#if defined(__GFX9__)
#define FA_WAVE 64
#else
#define FA_WAVE 32
#endif
#define FA_KERNEL(threads, waves_per_simd) \
  extern "C" __global__                    \
      __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves_per_simd)))
#define FA_GRID_CONSTANT
#else
#define FA_WAVE 32
#define FA_KERNEL(threads, blocks_per_sm) extern "C" __global__ __launch_bounds__(threads, blocks_per_sm)
#define FA_GRID_CONSTANT __grid_constant__
#endif
// How many matrix operands are read from LDS ahead of their use; 0: the compiler chooses. CDNA has few waves to hide
// LDS behind, and the compiler would put a read right before its use. RDNA3's operands are large, and it would start as
// many reads as there are registers.
#if defined(__GFX9__) || defined(__GFX11__)
#define FA_OPERANDS_AHEAD 1
#else
#define FA_OPERANDS_AHEAD 0
#endif
#define FA_UNROLL _Pragma("unroll")
#if FA_AMD
#define FA_NO_UNROLL _Pragma("nounroll")
#else
#define FA_NO_UNROLL _Pragma("unroll 1")
#endif

namespace flash_attn::gpu {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
inline constexpr int kWave = FA_WAVE, kOperandsAhead = FA_OPERANDS_AHEAD;
inline constexpr float kInf = __builtin_inff();

template <class To, class From>
FA_DEVICE To bit_cast(From from) {
  return __builtin_bit_cast(To, from);
}

#if FA_AMD
template <class T, int N>
using Vec = T __attribute__((ext_vector_type(N)));
#else
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
  FA_DEVICE T& operator[](int i) { return at[i]; }
  FA_DEVICE const T& operator[](int i) const { return at[i]; }
};
#endif

// 16 bytes: the width of memory operations, and one operand of a matrix engine.
using Unit = Vec<u32, 4>;
template <class T>
inline constexpr int kUnitElements = 16 / int(sizeof(T));

#if FA_AMD

FA_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
FA_DEVICE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
FA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
FA_DEVICE int lane_index() {
  if constexpr (kWave == 32) return __builtin_amdgcn_mbcnt_lo(~0u, 0);
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

// Fences of LDS alone: loads from global memory stay in flight over a barrier.
FA_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
// Orders LDS accesses of the lanes of one wave.
FA_DEVICE void wave_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront", "local"); }

// No matrix instruction and no LDS read is moved across; vector and scalar ones, and other memory, may be.
FA_DEVICE void keep_matrix_and_lds_order() { __builtin_amdgcn_sched_barrier(0x676); }

FA_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
FA_DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
FA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
FA_DEVICE bool any(bool x) {
#if FA_WAVE == 64
  return __builtin_amdgcn_ballot_w64(x) != 0;
#else
  return __builtin_amdgcn_ballot_w32(x) != 0;
#endif
}
FA_DEVICE float from_lane(float x, int lane) {
  return bit_cast<float>(__builtin_amdgcn_ds_bpermute(lane * 4, bit_cast<int>(x)));
}

#else

FA_DEVICE int thread_index() { return int(threadIdx.x); }
FA_DEVICE u32 block_index() { return blockIdx.x; }
FA_DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }
FA_DEVICE int lane_index() { return int(threadIdx.x % 32); }

FA_DEVICE void barrier() { __syncthreads(); }
FA_DEVICE void wave_fence() { __syncwarp(); }
FA_DEVICE void keep_matrix_and_lds_order() {}

FA_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FA_DEVICE float log2(float x) { return __log2f(x); }
FA_DEVICE float reciprocal(float x) { return __frcp_rn(x); }
FA_DEVICE bool any(bool x) { return __any_sync(~0u, x); }
FA_DEVICE float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }

#endif

// x is complete before anything that follows starts. Bounds how far loads run ahead, and so the registers that they
// take.
FA_DEVICE void finish_before(float& x) {
#if FA_AMD
  asm volatile("" : "+v"(x)::"memory");
#else
  asm volatile("" : "+f"(x)::"memory");
#endif
}

// use(i, load(i)) for i < kCount, where load reads a matrix operand from LDS, kOperandsAhead before its use. Matrix
// instructions and LDS reads may then not be moved across.
template <int kCount, class Load, class Use>
FA_DEVICE void load_and_use(Load load, Use use) {
  constexpr int kAhead = std::is_class_v<decltype(load(0))> ? 0 : kOperandsAhead;
  decltype(load(0)) x[kAhead + 1];
  if (kAhead > 0) x[0] = load(0);
  FA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (i + kAhead < kCount) x[(i + kAhead) % (kAhead + 1)] = load(i + kAhead);
    if constexpr (kAhead > 0) keep_matrix_and_lds_order();
    use(i, x[i % (kAhead + 1)]);
  }
}

// The value, of which the compiler knows nothing: what is computed from it stays where it stands, out of hot loops.
FA_DEVICE int opaque(int x) {
#if FA_AMD
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+r"(x));
#endif
  return x;
}

FA_DEVICE int wave_index() { return uniform(thread_index() / kWave); }
FA_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
FA_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Two numbers, for which CDNA has single instructions.
using Pair = Vec<float, 2>;
#if FA_AMD
FA_DEVICE Pair fma(Pair a, Pair b, Pair c) { return __builtin_elementwise_fma(a, b, c); }
#else
FA_DEVICE Pair operator+(Pair a, Pair b) { return {a[0] + b[0], a[1] + b[1]}; }
FA_DEVICE Pair operator-(Pair a, Pair b) { return {a[0] - b[0], a[1] - b[1]}; }
FA_DEVICE Pair operator*(Pair a, Pair b) { return {a[0] * b[0], a[1] * b[1]}; }
FA_DEVICE Pair fma(Pair a, Pair b, Pair c) { return {fma(a[0], b[0], c[0]), fma(a[1], b[1], c[1])}; }
#endif

// An odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
FA_DEVICE float tanh(float x) {
  const float a = x < 0 ? -x : x;
  const float x2 = x * x;
  const float series =
      x * fma(x2,
              fma(x2, fma(x2, fma(x2, 0.021869488536155203f, -0.05396825396825397f), 0.13333333333333333f),
                  -0.33333333333333333f),
              1.0f);
  const float far = 1.0f - 2.0f * reciprocal(exp2(a * 2.8853900817779268f) + 1.0f);
  return a < 0.25f ? series : (x < 0 ? -far : far);
}

// Loads and stores that assume no more alignment than the type's; callers promise `alignof(V)`.
template <class V>
FA_DEVICE V load(const void* p) {
  return *static_cast<const V*>(p);
}
template <class V>
FA_DEVICE void store(void* p, V value) {
  *static_cast<V*>(p) = value;
}

}  // namespace flash_attn::gpu
