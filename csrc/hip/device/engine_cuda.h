// NVIDIA tensor cores: mma.sync m16n8k16, fp16 and bf16 with fp32 accumulators (sm_80 and later).
//
// The same contract as in engine_amd.h, in the other orientation: the kept operand is the instruction's A. A lane holds
// parts of two kept rows, and a tile of 16 x 16 is two instructions.
#pragma once

#include "hip/device/tile_async.h"

namespace flash_attn::gpu {

template <class T, int kTileSize>
struct MmaSync {
  static_assert(kTileSize == 16, "tiles of two mma.sync.m16n8k16");
  using Element = T;
  static constexpr int kTile = 16, kRegisters = 8, kPack = 8, kKeptPerLane = 2, kKeptLaneStride = 4, kRun = 2;
  static constexpr int kFeatureStep = 16, kRowStep = 16;
  static constexpr int kUnrolledSteps = 64;  // of a loop over operands of `scores`: all
  using Accumulator = Vec<float, kRegisters>;
  using Operand = Unit;
  using Weights = Unit;

  // Of 8 registers, 0-3 belong to streamed rows 0-7 and 4-7 to 8-15; 0, 1, 4, 5 to the lane's first kept row.
  static constexpr int streamed_of_register(int r) { return r / 4 * 8 + r % 2; }
  FA_DEVICE static int streamed_of_lane() { return lane_index() % 4 * 2; }
  static constexpr int kept_slot(int r) { return r / 2 % 2; }
  static constexpr int register_of_slot(int slot, int n) { return n / 2 * 4 + slot * 2 + n % 2; }
  static constexpr int kept_of_slot(int slot) { return 8 * slot; }
  FA_DEVICE static int kept_of_lane() { return lane_index() / 4; }

  FA_DEVICE static Accumulator zero() { return {0, 0, 0, 0, 0, 0, 0, 0}; }
  FA_DEVICE static Operand pack(const float (&p)[kPack]) {
    return {narrow_pair<T>(p[0], p[1]), narrow_pair<T>(p[2], p[3]), narrow_pair<T>(p[4], p[5]),
            narrow_pair<T>(p[6], p[7])};
  }
  FA_DEVICE static void scores(Accumulator& s, const Operand& streamed, const Operand& kept) {
    multiply(s, kept, streamed);
  }
  FA_DEVICE static void accumulate(Accumulator& o, const Operand& columns, const Operand& weights) {
    multiply(o, weights, columns);
  }
  template <class Op>
  FA_DEVICE static float fold(float x, Op op) {
    x = op(x, __shfl_xor_sync(~0u, x, 1));
    return op(x, __shfl_xor_sync(~0u, x, 2));
  }

 private:
  FA_DEVICE static void multiply(Accumulator& c, const Operand& a, const Operand& b) {
    FA_UNROLL
    for (int n = 0; n < 2; ++n) {
      if constexpr (std::is_same_v<T, Half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[4 * n]), "+f"(c[4 * n + 1]), "+f"(c[4 * n + 2]), "+f"(c[4 * n + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * n]), "r"(b[2 * n + 1]));
      else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[4 * n]), "+f"(c[4 * n + 1]), "+f"(c[4 * n + 2]), "+f"(c[4 * n + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * n]), "r"(b[2 * n + 1]));
    }
  }
};

}  // namespace flash_attn::gpu
