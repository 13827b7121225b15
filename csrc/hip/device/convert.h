// fp32 to and from the 16-bit types, two at a time, rounding to nearest even.
#pragma once

#include "hip/device/platform.h"

namespace flash_attn::gpu {

FA_DEVICE float widen(float x) { return x; }
FA_DEVICE float widen(BFloat16 x) { return bit_cast<float>(u32(x.bits) << 16); }

#if FA_AMD
FA_DEVICE float widen(Half x) { return float(bit_cast<_Float16>(x.bits)); }

// The high halves of two words: one v_perm_b32.
FA_DEVICE u32 join_high(u32 low, u32 high) { return __builtin_amdgcn_perm(high, low, 0x07060302u); }
FA_DEVICE u32 join_low(u32 low, u32 high) { return __builtin_amdgcn_perm(high, low, 0x05040100u); }

template <class T>
FA_DEVICE u32 narrow_pair(float low, float high);
template <>
FA_DEVICE u32 narrow_pair<Half>(float low, float high) {
  return bit_cast<u32>(Vec<_Float16, 2>{_Float16(low), _Float16(high)});
}
// Without a guard for NaN: rounding carries into the exponent only for payloads that arithmetic on 16-bit inputs never
// makes.
template <>
FA_DEVICE u32 narrow_pair<BFloat16>(float low, float high) {
  const u32 a = bit_cast<u32>(low), b = bit_cast<u32>(high);
  return join_high(a + (a >> 16 & 1u) + 0x7fffu, b + (b >> 16 & 1u) + 0x7fffu);
}
#else
FA_DEVICE float widen(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class T>
FA_DEVICE u32 narrow_pair(float low, float high) {
  u32 y;
  if constexpr (std::is_same_v<T, Half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

#endif

template <class T>
FA_DEVICE T narrow(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return T{u16(narrow_pair<T>(x, x))};
}

// sum + the dot product of two units of T.
template <class T>
FA_DEVICE float add_products(Unit a, Unit b, float sum) {
  FA_UNROLL
  for (int i = 0; i < kUnitElements<T>; ++i) {
    if constexpr (sizeof(T) == 4)
      sum = fma(bit_cast<float>(a[i]), bit_cast<float>(b[i]), sum);
    else
      sum = fma(widen(T{u16(a[i / 2] >> (16 * (i % 2)))}), widen(T{u16(b[i / 2] >> (16 * (i % 2)))}), sum);
  }
  return sum;
}

}  // namespace flash_attn::gpu
