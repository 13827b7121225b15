// From a row of the manifest to a kernel: its template arguments, its name, its bounds.
#pragma once

#include "hip/device/engine.h"

namespace flash_attn::gpu {

using bf16 = BFloat16;
using f16 = Half;
using f32 = float;
inline constexpr bool plain = false, general = true;

template <class EngineType, int kDim, int kValueDim, bool kIsGeneral, int kKept, int kWaveCount, int kStreamed>
struct Plan {
  using Engine = EngineType;
  static constexpr int kD = kDim, kDv = kValueDim, kKeptTiles = kKept, kWaves = kWaveCount, kStreamedRows = kStreamed;
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kThreads = kWaves * kWave;
  static_assert(kThreads <= 1024, "a block has at most 1024 threads");
  static_assert(kD % Engine::kFeatureStep == 0 && kDv % Engine::kTile == 0, "whole operands of features");
  static_assert(kStreamed % Engine::kTile == 0 && kStreamed % Engine::kRowStep == 0, "whole operands of streamed rows");
  static_assert(64 % kStreamed == 0 || kStreamed % 64 == 0,
                "a step meets whole dropout blocks of 64 keys, or a part of one");

  // Kept operands of the backward kernels, which have two of them besides up to two outputs: in registers, where these
  // take at most 64 (of 256; 128 of CDNA's 512).
  static constexpr bool kKeptInLds = kKept * Engine::kTile * (kD + kDv) / 2 > 64 * kWave*(kWave / 32);
  template <int kFeatures>
  using Kept = std::conditional_t<kKeptInLds, KeptInLds<Engine, kKept, kFeatures>, KeptRows<Engine, kKept, kFeatures>>;
};

}  // namespace flash_attn::gpu

// Rows of other targets and families expand to nothing.
#define FA_NOTHING(...)
#if defined(__gfx942__)
#define FA_TARGET_cdna3 FA_INSTANCE
#else
#define FA_TARGET_cdna3 FA_NOTHING
#endif
#if defined(__gfx1200__) || defined(__gfx1201__)
#define FA_TARGET_rdna4 FA_INSTANCE
#else
#define FA_TARGET_rdna4 FA_NOTHING
#endif
#if FA_AMD
#define FA_TARGET_cuda FA_NOTHING
#else
#define FA_TARGET_cuda FA_INSTANCE
#endif
#define FA_ROW(family, target, ...) FA_TARGET_##target(family, __VA_ARGS__)
#define FA_INSTANCE(family, ...) FA_FAMILY_##family(__VA_ARGS__)

// LDS is static on AMD, and dynamic on NVIDIA, whose static limit is 48 KB.
#if FA_AMD
#define FA_LDS(bytes) __shared__ __attribute__((aligned(16))) char lds[bytes]
#else
#define FA_LDS(bytes) extern __shared__ __align__(128) char lds[]
#endif

#define FA_DEFINE_KERNEL(name, Kernel, Args, ...)                                       \
  FA_KERNEL(__VA_ARGS__) void name(const FA_GRID_CONSTANT Args args) {                  \
    static_assert(Kernel::kLdsBytes <= FA_LDS_LIMIT, "more LDS than a block can have"); \
    FA_LDS(Kernel::kLdsBytes);                                                          \
    Kernel::run(args, lds);                                                             \
  }
#if FA_AMD
#define FA_LDS_LIMIT 65536
#else
#define FA_LDS_LIMIT 163 * 1024
#endif
