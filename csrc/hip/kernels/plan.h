// From a row of the manifest to a kernel: its template arguments, its name, its bounds.
#pragma once

#include "hip/device/engine.h"
#include "hip/kernel_shape.h"

namespace flash_attn::gpu {

using bf16 = BFloat16;
using f16 = Half;
using f32 = float;
inline constexpr int plain = 0, general = 1, cache = 2, decode = 3;

#if !FA_AMD
inline constexpr Target kTarget = Target::cuda;
#elif defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define FA_CDNA
inline constexpr Target kTarget = Target::cdna;
#elif defined(__GFX11__)
#define FA_RDNA3
inline constexpr Target kTarget = Target::rdna3;
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define FA_RDNA4
inline constexpr Target kTarget = Target::rdna4;
#elif defined(__GFX9__)
#define FA_GCN
inline constexpr Target kTarget = Target::gcn;
#elif defined(__GFX10__)
#define FA_RDNA2
inline constexpr Target kTarget = Target::rdna2;
#else
#error "csrc/hip/targets.h has no kind for this target"
#endif

// Where kept operands are.
template <bool kIsFma, bool kInLds>
struct KeptStorage {
  template <class Engine, int kTiles, int kFeatures>
  using Of = KeptInLds<Engine, kTiles, kFeatures>;
};
template <>
struct KeptStorage<false, false> {
  template <class Engine, int kTiles, int kFeatures>
  using Of = KeptRows<Engine, kTiles, kFeatures>;
};
template <>
struct KeptStorage<true, false> {
  template <class Engine, int kTiles, int kFeatures>
  using Of = KeptInGlobal<Engine, kTiles, kFeatures>;
};

template <Family kFamily, class EngineType, EngineKind kKind, int kDim, int kValueDim, int kVariant, int kKept,
          int kWaveCount, int kStreamed>
struct Plan {
  using Engine = EngineType;
  static constexpr KernelShape kShape = {kFamily,    kTarget,   kKind,         int(sizeof(typename Engine::Element)),
                                         kDim,       kValueDim, Engine::kTile, kKept,
                                         kWaveCount, kStreamed};
  static constexpr int kD = kDim, kDv = kValueDim, kKeptTiles = kKept, kWaves = kWaveCount, kStreamedRows = kStreamed;
  static constexpr bool kGeneral = kVariant != plain, kCache = kVariant == cache || kVariant == decode;
  static constexpr int kThreads = kShape.threads(), kBlockRows = kShape.block_rows();
  static_assert(kThreads <= 1024, "a block has at most 1024 threads");
  static_assert(kD % Engine::kFeatureStep == 0 && kDv % Engine::kTile == 0, "whole operands of features");
  static_assert(kStreamed % Engine::kTile == 0 && kStreamed % Engine::kRowStep == 0, "whole operands of streamed rows");
  static_assert(64 % kStreamed == 0 || kStreamed % 64 == 0,
                "a step meets whole dropout blocks of 64 keys, or a part of one");

  template <int kFeatures>
  using Kept = typename KeptStorage<kKind == EngineKind::Fma && kFamily != Family::forward,
                                    kShape.keeps_in_lds()>::template Of<Engine, kKept, kFeatures>;
};

}  // namespace flash_attn::gpu

// Rows of other kinds of targets and of other families expand to nothing.
#define FA_NOTHING(...)
#if defined(FA_GCN)
#define FA_TARGET_gcn FA_INSTANCE
#else
#define FA_TARGET_gcn FA_NOTHING
#endif
#if defined(FA_CDNA)
#define FA_TARGET_cdna FA_INSTANCE
#else
#define FA_TARGET_cdna FA_NOTHING
#endif
#if defined(FA_RDNA2)
#define FA_TARGET_rdna2 FA_INSTANCE
#else
#define FA_TARGET_rdna2 FA_NOTHING
#endif
#if defined(FA_RDNA3)
#define FA_TARGET_rdna3 FA_INSTANCE
#else
#define FA_TARGET_rdna3 FA_NOTHING
#endif
#if defined(FA_RDNA4)
#define FA_TARGET_rdna4 FA_INSTANCE
#else
#define FA_TARGET_rdna4 FA_NOTHING
#endif
#if FA_AMD
#define FA_TARGET_cuda FA_NOTHING
#else
#define FA_TARGET_cuda FA_INSTANCE
#endif
#define FA_ROW_OF(target, family, ...) FA_TARGET_##target(family, __VA_ARGS__)
#define FA_INSTANCE(family, ...) FA_FAMILY_##family(__VA_ARGS__)

// LDS is static on AMD, and dynamic on NVIDIA, whose static limit is 48 KB.
#if FA_AMD
#define FA_LDS(bytes) __shared__ __attribute__((aligned(16))) char lds[bytes]
#else
#define FA_LDS(bytes) extern __shared__ __align__(128) char lds[]
#endif

// A kernel `name` that runs class template Kernel<Plan>.
#define FA_DEFINE_KERNEL(name, Kernel, Args, family, dtype, D, Dv, variant, engine, tile, kept, waves, streamed,     \
                         occupancy)                                                                                  \
  using name##_plan =                                                                                                \
      Plan<Family::family, engine<dtype, tile>, EngineKind::engine, D, Dv, variant, kept, waves, streamed>;          \
  FA_KERNEL(name##_plan::kThreads, occupancy) void name(const FA_GRID_CONSTANT Args args) {                          \
    constexpr int kLdsBytes = Kernel<name##_plan>::kLdsBytes;                                                        \
    static_assert(kLdsBytes == name##_plan::kShape.lds_bytes(), "the manifest knows the LDS that the kernel needs"); \
    static_assert(kLdsBytes <= name##_plan::kShape.lds_limit(), "more LDS than a block can have");                   \
    FA_LDS(kLdsBytes);                                                                                               \
    Kernel<name##_plan>::run(args, lds);                                                                             \
  }
