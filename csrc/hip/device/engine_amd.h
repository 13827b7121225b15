// Matrix engines of AMD GPUs: MFMA (CDNA) and WMMA (RDNA4), fp16 and bf16 with fp32 accumulators.
//
// Every engine multiplies kTile x kTile tiles in two ways:
//   scores:      S[streamed, kept] += streamed rows . kept rows           (contraction over features)
//   accumulate:  O[feature, kept]  += columns . weights                   (contraction over streamed rows)
// where forward keeps queries and streams keys. Here the streamed operand is the instruction's A and the kept one its
// B, so that a lane owns one kept row: maxima and sums run along its registers, and kPack successive registers of S,
// rounded by pack(), are the B operand of `accumulate`. P never leaves its lane.
//
// A register r of the tiles of S, counted through, stands for streamed row streamed_of_register(r) +
// streamed_of_lane(); the two have no bit in common. In the same way kept_of_slot(kept_slot(r)) + kept_of_lane() is its
// kept row. register_of_slot(slot, n) is the n-th register of a slot; the lane with the next kept row, if that is in
// the same 4, is kKeptLaneStride lanes away.
#pragma once

#include "hip/device/tile_registers.h"

namespace flash_attn::gpu {

template <class T, int kTileSize>
struct LaneKeepsRow {
  using Element = T;
  static constexpr int kTile = kTileSize;
  static constexpr int kGroups = kWave / kTile;             // lanes that share a kept row
  static constexpr int kRegisters = kTile * kTile / kWave;  // of a tile
  static constexpr int kPack = 8;                           // registers of one pack()
  static constexpr int kFeatureStep = 8 * kGroups;          // of one operand of `scores`
  static constexpr int kRowStep = 8 * kGroups;              // streamed rows of one pack()
  static constexpr int kKeptPerLane = 1, kKeptLaneStride = 1;
  static constexpr int kUnrolledSteps = 64;  // of a loop over operands of `scores`: all
  static constexpr int kOperandUnits = 1;    // of the kGroups in a row's step, those that one lane holds

  using Accumulator = Vec<float, kRegisters>;
  using Operand = Unit;
  using Weights = Unit;

  FA_DEVICE static Accumulator zero() { return Accumulator(0.0f); }
  FA_DEVICE static int kept_of_lane() { return lane_index() % kTile; }
  FA_DEVICE static int operand_row() { return lane_index() % kTile; }  // Of a streamed tile, the one this lane holds.
  static constexpr int kept_slot(int) { return 0; }
  static constexpr int register_of_slot(int, int n) { return n; }
  static constexpr int kept_of_slot(int) { return 0; }

  FA_DEVICE static Operand pack(const float (&p)[kPack]) {
    return {narrow_pair<T>(p[0], p[1]), narrow_pair<T>(p[2], p[3]), narrow_pair<T>(p[4], p[5]),
            narrow_pair<T>(p[6], p[7])};
  }

  // Over the lanes that share a kept row.
  template <class Op>
  FA_DEVICE static float fold(float x, Op op) {
    FA_UNROLL
    for (int distance = kTile; distance < kWave; distance *= 2) x = op(x, from_lane(x, lane_index() ^ distance));
    return x;
  }
};

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)

// v_mfma_f32_32x32x8 and 16x16x16: A and B have 4 numbers per lane, group g holding contraction indices 4g .. 4g+3. An
// operand of 8 feeds two of them; which 4 features meet in which is free as long as both sides agree.
template <class T, int kTileSize>
struct Mfma : LaneKeepsRow<T, kTileSize> {
  static_assert(kTileSize == 32 || kTileSize == 16, "tiles of v_mfma_f32_32x32x8 or v_mfma_f32_16x16x16");
  using Base = LaneKeepsRow<T, kTileSize>;
  using typename Base::Accumulator, typename Base::Operand;

  static constexpr int kRun = 4;  // successive registers of successive streamed rows
  static constexpr int streamed_of_register(int r) { return r / 4 * 4 * Base::kGroups + r % 4; }
  FA_DEVICE static int streamed_of_group(int group) { return 4 * group; }
  FA_DEVICE static int streamed_of_lane() { return streamed_of_group(lane_index() / Base::kTile); }

  FA_DEVICE static void scores(Accumulator& s, Operand streamed, Operand kept) { multiply(s, streamed, kept); }
  FA_DEVICE static void accumulate(Accumulator& o, Operand columns, Operand weights) { multiply(o, columns, weights); }

 private:
  FA_DEVICE static void multiply(Accumulator& c, Operand a, Operand b) {
    c = half_step(Vec<u32, 2>{a[0], a[1]}, Vec<u32, 2>{b[0], b[1]}, c);
    c = half_step(Vec<u32, 2>{a[2], a[3]}, Vec<u32, 2>{b[2], b[3]}, c);
  }
  FA_DEVICE static Accumulator half_step(Vec<u32, 2> a, Vec<u32, 2> b, Accumulator c) {
    if constexpr (std::is_same_v<T, Half>) {
      const auto x = bit_cast<Vec<_Float16, 4>>(a), y = bit_cast<Vec<_Float16, 4>>(b);
      if constexpr (kTileSize == 32)
        return __builtin_amdgcn_mfma_f32_32x32x8f16(x, y, c, 0, 0, 0);
      else
        return __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, c, 0, 0, 0);
    } else {
      const auto x = bit_cast<Vec<short, 4>>(a), y = bit_cast<Vec<short, 4>>(b);
      if constexpr (kTileSize == 32)
        return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, c, 0, 0, 0);
      else
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c, 0, 0, 0);
    }
  }
};

#elif defined(__gfx1200__) || defined(__gfx1201__)

// v_wmma_f32_16x16x16: the two lane groups hold 8 contraction indices each, and rows 0-7 and 8-15 of the result.
template <class T, int kTileSize>
struct Wmma : LaneKeepsRow<T, kTileSize> {
  static_assert(kTileSize == 16, "tiles of v_wmma_f32_16x16x16");
  using Base = LaneKeepsRow<T, kTileSize>;
  using typename Base::Accumulator, typename Base::Operand;

  static constexpr int kRun = 8;
  static constexpr int streamed_of_register(int r) { return r / 8 * 16 + r % 8; }
  FA_DEVICE static int streamed_of_group(int group) { return 8 * group; }
  FA_DEVICE static int streamed_of_lane() { return streamed_of_group(lane_index() / Base::kTile); }

  FA_DEVICE static void scores(Accumulator& s, Operand streamed, Operand kept) { multiply(s, streamed, kept); }
  FA_DEVICE static void accumulate(Accumulator& o, Operand columns, Operand weights) { multiply(o, columns, weights); }

 private:
  FA_DEVICE static void multiply(Accumulator& c, Operand a, Operand b) {
    if constexpr (std::is_same_v<T, Half>)
      c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(bit_cast<Vec<_Float16, 8>>(a), bit_cast<Vec<_Float16, 8>>(b),
                                                           c);
    else
      c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(bit_cast<Vec<short, 8>>(a), bit_cast<Vec<short, 8>>(b), c);
  }
};

#endif

}  // namespace flash_attn::gpu
