// One matrix instruction per wave, fragments loaded and stored by the documented layouts, in row-major A (M x K), B (K
// x N), C (M x N).
#include "device.h"

#if __gfx942__
GLOBAL THREADS(64) void mfma_32x32x8_f16(const f16* a, const f16* b, float* c) {
  const int i = lane() % 32, k = lane() / 32 * 4;
  f16x4 fa, fb;
  for (int e = 0; e < 4; ++e) fa[e] = a[i * 8 + k + e], fb[e] = b[(k + e) * 32 + i];
  f32x16 acc = {};
  acc = __builtin_amdgcn_mfma_f32_32x32x8f16(fa, fb, acc, 0, 0, 0);
  for (int r = 0; r < 16; ++r) c[(8 * (r / 4) + 4 * (lane() / 32) + r % 4) * 32 + i] = acc[r];
}

GLOBAL THREADS(64) void mfma_16x16x16_bf16(const short* a, const short* b, float* c) {
  const int i = lane() % 16, k = lane() / 16 * 4;
  s16x4 fa, fb;
  for (int e = 0; e < 4; ++e) fa[e] = a[i * 16 + k + e], fb[e] = b[(k + e) * 16 + i];
  f32x4 acc;
  for (int r = 0; r < 4; ++r) acc[r] = c[(4 * (lane() / 16) + r) * 16 + i];
  acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(fa, fb, acc, 0, 0, 0);
  for (int r = 0; r < 4; ++r) c[(4 * (lane() / 16) + r) * 16 + i] = acc[r];
}

GLOBAL THREADS(64) void mfma_32x32x8_bf16(const short* a, const short* b, float* c) {
  const int i = lane() % 32, k = lane() / 32 * 4;
  s16x4 fa, fb;
  for (int e = 0; e < 4; ++e) fa[e] = a[i * 8 + k + e], fb[e] = b[(k + e) * 32 + i];
  f32x16 acc = {};
  acc = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(fa, fb, acc, 0, 0, 0);
  for (int r = 0; r < 16; ++r) c[(8 * (r / 4) + 4 * (lane() / 32) + r % 4) * 32 + i] = acc[r];
}

GLOBAL THREADS(64) void mfma_16x16x16_f16(const f16* a, const f16* b, float* c) {
  const int i = lane() % 16, k = lane() / 16 * 4;
  f16x4 fa, fb;
  for (int e = 0; e < 4; ++e) fa[e] = a[i * 16 + k + e], fb[e] = b[(k + e) * 16 + i];
  f32x4 acc = {};
  acc = __builtin_amdgcn_mfma_f32_16x16x16f16(fa, fb, acc, 0, 0, 0);
  for (int r = 0; r < 4; ++r) c[(4 * (lane() / 16) + r) * 16 + i] = acc[r];
}

GLOBAL THREADS(64) void mfma_32x32x2_f32(const float* a, const float* b, float* c) {
  const int i = lane() % 32, k = lane() / 32;
  f32x16 acc = {};
  acc = __builtin_amdgcn_mfma_f32_32x32x2f32(a[i * 2 + k], b[k * 32 + i], acc, 0, 0, 0);
  for (int r = 0; r < 16; ++r) c[(8 * (r / 4) + 4 * (lane() / 32) + r % 4) * 32 + i] = acc[r];
}
#endif

#if __GFX11__
GLOBAL THREADS(32) void wmma_16x16x16_f16(const f16* a, const f16* b, float* c) {
  const int i = lane() % 16, half = lane() / 16;
  f16x16 fa, fb;
  for (int k = 0; k < 16; ++k) fa[k] = a[i * 16 + k], fb[k] = b[k * 16 + i];
  f32x8 acc = {};
  acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(fa, fb, acc);
  for (int r = 0; r < 8; ++r) c[(2 * r + half) * 16 + i] = acc[r];
}

GLOBAL THREADS(32) void wmma_16x16x16_bf16(const short* a, const short* b, float* c) {
  const int i = lane() % 16, half = lane() / 16;
  s16x16 fa, fb;
  for (int k = 0; k < 16; ++k) fa[k] = a[i * 16 + k], fb[k] = b[k * 16 + i];
  f32x8 acc;
  for (int r = 0; r < 8; ++r) acc[r] = c[(2 * r + half) * 16 + i];
  acc = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(fa, fb, acc);
  for (int r = 0; r < 8; ++r) c[(2 * r + half) * 16 + i] = acc[r];
}
#endif

#if __GFX12__
GLOBAL THREADS(32) void wmma_16x16x16_f16(const f16* a, const f16* b, float* c) {
  const int i = lane() % 16, half = lane() / 16;
  f16x8 fa, fb;
  for (int e = 0; e < 8; ++e) {
    const int k = 8 * (e / 4) + 4 * half + e % 4;
    fa[e] = a[i * 16 + k], fb[e] = b[k * 16 + i];
  }
  f32x8 acc = {};
  acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(fa, fb, acc);
  for (int r = 0; r < 8; ++r) c[(8 * half + r) * 16 + i] = acc[r];
}

GLOBAL THREADS(32) void wmma_16x16x16_bf16(const short* a, const short* b, float* c) {
  const int i = lane() % 16, half = lane() / 16;
  s16x8 fa, fb;
  for (int e = 0; e < 8; ++e) {
    const int k = 8 * (e / 4) + 4 * half + e % 4;
    fa[e] = a[i * 16 + k], fb[e] = b[k * 16 + i];
  }
  f32x8 acc;
  for (int r = 0; r < 8; ++r) acc[r] = c[(8 * half + r) * 16 + i];
  acc = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(fa, fb, acc);
  for (int r = 0; r < 8; ++r) c[(8 * half + r) * 16 + i] = acc[r];
}
#endif
