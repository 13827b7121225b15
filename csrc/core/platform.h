// Compiler differences, in one place.
#pragma once

#include <cstdint>

#if defined(__HIPCC__) || defined(__CUDACC__) || defined(__HIP__)
#define FA_HOST_DEVICE __host__ __device__
#else
#define FA_HOST_DEVICE
#endif

// Forced, not hinted: the CPU kernels are compiled once per instruction set, and an inline function that is emitted out
// of line becomes a weak symbol of which the linker keeps any one copy, perhaps the AVX-512 one for a machine that
// lacks it.
#if defined(_MSC_VER)
#define FA_INLINE FA_HOST_DEVICE __forceinline
#define FA_NOINLINE __declspec(noinline)
#define FA_OPAQUE(integer)
#define FA_THROUGH_MEMORY(x)
#define FA_RESTRICT __restrict
#include <intrin.h>
#include <xmmintrin.h>
#define FA_NOP() __nop()
#define FA_PREFETCH(address) _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0)
#define FA_PREFETCH_L2(address) _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1)
#define FA_UNROLL_BY_4
#else
#define FA_INLINE FA_HOST_DEVICE inline __attribute__((always_inline))
#define FA_NOINLINE __attribute__((noinline))
#define FA_OPAQUE(integer) __asm__("" : "+r"(integer))  // What is computed from it is computed here and not before.
#define FA_THROUGH_MEMORY(x) __asm__("" : "+m"(x))      // It is stored here and loaded again.
#define FA_RESTRICT __restrict__
#define FA_NOP() __asm__ volatile("nop")
#define FA_PREFETCH(address) __builtin_prefetch(address)
#define FA_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)
#if defined(__clang__)
#define FA_UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")  // Before a loop.
#else
#define FA_UNROLL_BY_4 _Pragma("GCC unroll 4")
#endif
#endif

namespace flash_attn {

using index_t = std::int64_t;

template <class T>
FA_INLINE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FA_INLINE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
FA_INLINE constexpr index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }
FA_INLINE constexpr index_t round_up(index_t a, index_t b) { return ceil_div(a, b) * b; }

}  // namespace flash_attn
