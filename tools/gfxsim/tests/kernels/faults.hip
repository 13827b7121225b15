// Kernels with one bug each, which the simulator must find.
#include "device.h"

GLOBAL void reads_past_end(const float* x, float* out, int n) {
  const int i = block() * 256 + thread();
  if (i <= n) out[i] = i < n ? x[i] : x[i + 1];
}

// No barrier between the write of one wave and the read of another.
GLOBAL THREADS(256) void misses_barrier(const float* x, float* out) {
  SHARED float tile[256];
  tile[thread()] = x[thread()];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_wave_barrier();
  out[thread()] = tile[255 - thread()];
}

// A barrier, but the next iteration's write may overtake this iteration's reads.
GLOBAL THREADS(256) void misses_second_barrier(const float* x, float* out) {
  SHARED float tile[256];
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    tile[thread()] = x[thread() + i];
    barrier();
    sum += tile[255 - thread()];
  }
  out[thread()] = sum;
}

// The barrier is there, the wait for the LDS write before it is not.
GLOBAL THREADS(256) void misses_lds_wait(const float* x, float* out) {
  SHARED float tile[256];
  tile[thread()] = x[thread()];
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[thread()] = tile[255 - thread()];
}

// Every wave but the first waits for its atomic before the barrier.
GLOBAL THREADS(256) void misses_wait_of_one_atomic(int* out) {
  SHARED int count;
  if (thread() == 0) count = 0;
  barrier();
  __hip_atomic_fetch_add(&count, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  if (__builtin_amdgcn_readfirstlane(thread()) != 0) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[thread()] = count;
}

GLOBAL THREADS(256) void reads_unwritten_lds(float* out) {
  SHARED float tile[256];
  if (thread() < 200) tile[thread()] = 1.0f;
  barrier();
  out[thread()] = tile[thread()];
}

GLOBAL THREADS(256) void writes_past_lds(float* out, int at) {
  extern SHARED float tile[];
  tile[thread() + at] = 1.0f;
  barrier();
  out[thread()] = tile[thread()];
}

GLOBAL void uses_load_too_early(const float* x, float* out) {
  float value, result;
  const float* from = x + thread();
#if __GFX9__
  asm volatile("global_load_dword %0, %1, off\n\tv_add_f32 %0, 1.0, %0\n\ts_waitcnt vmcnt(0)"
               : "=&v"(value)
               : "v"(from));
#elif __GFX11__
  asm volatile("global_load_b32 %0, %1, off\n\tv_add_f32 %0, 1.0, %0\n\ts_waitcnt vmcnt(0)" : "=&v"(value) : "v"(from));
#else
  asm volatile("global_load_b32 %0, %1, off\n\tv_add_f32 %0, 1.0, %0\n\ts_wait_loadcnt 0" : "=&v"(value) : "v"(from));
#endif
  result = value;
  out[thread()] = result;
}

GLOBAL void stores_unwritten_register(float* out) {
  float value;
  asm volatile("" : "=v"(value));
  out[thread()] = value;
}

GLOBAL void branches_on_unwritten_register(float* out) {
  int value;
  asm volatile("" : "=v"(value));
  if (value > 3) out[thread()] = 1.0f;
}

GLOBAL THREADS(256) void diverges_at_barrier(const int* x, int* out) {
  SHARED int tile[256];
  tile[thread()] = x[thread()];
  if (x[thread()] > 0) {
    barrier();
    out[thread()] = tile[255 - thread()];
  }
}

// One wave leaves before the barrier.
GLOBAL THREADS(256) void leaves_before_barrier(int* out) {
  if (__builtin_amdgcn_readfirstlane(thread()) >= 192) return;
  __builtin_amdgcn_s_barrier();
  out[thread()] = 1;
}

#if __GFX12__
// Waits for a barrier that no wave has signalled. (On gfx9 a barrier is one instruction.)
GLOBAL THREADS(256) void waits_without_signal(int* out) {
  __builtin_amdgcn_s_barrier_wait(-1);
  out[thread()] = 1;
}
#endif

#if __GFX11__
// Both halves of the wave hold rows of their own, where the second must repeat the first.
GLOBAL THREADS(32) void matrix_operand_is_not_repeated(float* out) {
  f16x16 a, b;
  for (int k = 0; k < 16; ++k) a[k] = f16(thread() % 16 + k), b[k] = f16(thread() + k);
  f32x8 sum = {};
  sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, sum);
  for (int r = 0; r < 8; ++r) out[r * 32 + thread()] = sum[r];
}
#endif

// The last wave to store wins.
GLOBAL THREADS(256) void depends_on_wave_order(int* out) { out[0] = thread() / __builtin_amdgcn_wavefrontsize(); }

// Every wave stores where an atomic counter says: all values are there, in the order of the waves.
GLOBAL THREADS(256) void depends_on_atomic_order(unsigned* out) {
  if (lane() == 0)
    out[1 + __hip_atomic_fetch_add(out, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)] =
        thread() / __builtin_amdgcn_wavefrontsize();
}

GLOBAL void never_ends(int* out) {
  volatile int* flag = out;
  while (*flag == 0) {
  }
}

GLOBAL void unknown_instruction(unsigned* out) {
  unsigned value;
#if __GFX9__
  asm volatile("v_cubeid_f32 %0, 1.0, 2.0, %1" : "=v"(value) : "v"(thread()));
#else
  asm volatile("v_sad_u8 %0, 1, 2, %1" : "=v"(value) : "v"(thread()));
#endif
  out[thread()] = value;
}
