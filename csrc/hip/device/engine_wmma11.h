// RDNA3's matrix engine: v_wmma_f32_16x16x16 of gfx11, fp16 and bf16 with fp32 accumulators. See engine_amd.h for what
// an engine is.
//
// A lane holds all 16 contraction indices of its row, lanes l and l + 16 the same ones; register r of the result is row
// 2 r + lane / 16. Which row is which is free: rows enter A in an order in which the result's registers are runs of
// four successive rows, as MFMA's are, so that stores and dropout's bytes come in fours. Lanes l and l + 16 have half
// of a kept row's scores each, and the second product wants them all in both, in one order: pack() exchanges the
// rounded halves.
#pragma once

#include "hip/device/engine_amd.h"

namespace flash_attn::gpu {

template <class T, int kTileSize>
struct Wmma : LaneKeepsRow<T, kTileSize> {
  static_assert(kTileSize == 16, "tiles of v_wmma_f32_16x16x16");
  using Base = LaneKeepsRow<T, kTileSize>;
  using typename Base::Accumulator;

  static constexpr int kOperandUnits = 2;
  using Operand = Vec<u32, 4 * kOperandUnits>;
  using Weights = Operand;

  static constexpr int kRun = 4;
  static constexpr int streamed_of_register(int r) { return r / 4 * 8 + r % 4; }
  FA_DEVICE static int streamed_of_group(int group) { return 4 * group; }
  FA_DEVICE static int streamed_of_lane() { return streamed_of_group(lane_index() / Base::kTile); }

  // Of a tile of streamed rows (in `accumulate`: of features), the one whose numbers this lane holds: row 2 r + g of A
  // becomes register r of group g.
  FA_DEVICE static int operand_row() {
    const int row = lane_index() % Base::kTile;
    return row / 8 * 8 + row % 2 * 4 + row / 2 % 4;
  }

  // The lower lanes' numbers first, in both.
  FA_DEVICE static Weights pack(const float (&p)[Base::kPack]) {
    const Unit own = Base::pack(p);
    const bool is_lower = lane_index() < Base::kTile;
    Weights all;
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const u32 other = __builtin_amdgcn_permlanex16(0, own[i], 0x76543210u, 0xfedcba98u, true, false);
      all[i] = is_lower ? own[i] : other;
      all[4 + i] = is_lower ? other : own[i];
    }
    return all;
  }

  FA_DEVICE static void scores(Accumulator& s, Operand streamed, Operand kept) { multiply(s, streamed, kept); }
  FA_DEVICE static void accumulate(Accumulator& o, Operand columns, Operand weights) { multiply(o, columns, weights); }

 private:
  FA_DEVICE static void multiply(Accumulator& c, Operand a, Operand b) {
    if constexpr (std::is_same_v<T, Half>)
      c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(bit_cast<Vec<_Float16, 16>>(a), bit_cast<Vec<_Float16, 16>>(b), c);
    else
      c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(bit_cast<Vec<short, 16>>(a), bit_cast<Vec<short, 16>>(b), c);
    // Reads of later operands may not move up here (the compiler's scheduling barrier does not hold back WMMA).
    asm volatile("" : "+v"(c)::"memory");
  }
};

template <class T, int N, int kTiles, int kFeatures>
class KeptRows<Wmma<T, N>, kTiles, kFeatures> {
  using Engine = Wmma<T, N>;

 public:
  static constexpr int kBytesPerWave = 0;
  FA_DEVICE explicit KeptRows(char*) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) FA_UNROLL
    for (int step = 0; step < kSteps; ++step) FA_UNROLL
    for (int u = 0; u < Engine::kOperandUnits; ++u) {
      const Unit unit = load_padded<kMayBeIrregular, 4>(rows, tile * N + Engine::kept_of_lane(),
                                                        step * Engine::kFeatureStep + u * kUnitElements<T>);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) held_[tile][step][4 * u + i] = unit[i];
    }
  }
  FA_DEVICE typename Engine::Operand operand(int tile, int step) const { return held_[tile][step]; }

 private:
  static constexpr int kSteps = kFeatures / Engine::kFeatureStep;
  typename Engine::Operand held_[kTiles][kSteps];
};

}  // namespace flash_attn::gpu
