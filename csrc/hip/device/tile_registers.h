// Tiles of K, V, Q, dO on the way from global memory through registers to LDS, for engines whose operand is a unit of 8
// 16-bit numbers per lane: of one row, the part of the contraction index that belongs to group lane / kTile. Or, on
// RDNA3, all of it: successive units.
//
// A RowTile contracts over features, a ColumnTile over rows: it is transposed in registers on the way, and the order of
// its rows inside a unit is that in which a score tile stands in the engine's registers, so that P needs no shuffle.
#pragma once

#include "hip/device/rows.h"

namespace flash_attn::gpu {

// The operand of a tile's rows in LDS: of row `lane_row`, the lane's unit of the step or all of them. Where it is all,
// only the row depends on the lane, so a few registers and immediates are the addresses of all operands.
template <class Engine, class Layout>
FA_DEVICE typename Engine::Operand load_operand(const char* lds, int tile, int step, int lane_row) {
  const int first_row = tile * Engine::kTile, first_unit = step * Engine::kGroups;
  if constexpr (Engine::kOperandUnits == 1) {
    return load<Unit>(lds + Layout::offset(first_row + lane_row, first_unit + lane_index() / Engine::kTile));
  } else {
    constexpr int kSwizzled = Layout::kSwizzledBytes - 1;
    typename Engine::Operand operand;
    FA_UNROLL
    for (int u = 0; u < Engine::kOperandUnits; ++u) {
      const int first = Layout::offset(first_row, first_unit + u);
      const Unit unit = load<Unit>(lds + (Layout::offset(lane_row, 0) ^ (first & kSwizzled)) + (first & ~kSwizzled));
      FA_UNROLL
      for (int i = 0; i < 4; ++i) operand[4 * u + i] = unit[i];
    }
    return operand;
  }
}

// kRows x kFeatures, for products that contract over features.
template <class Engine, int kRows, int kFeatures, int kThreads>
class RowTile {
  using T = typename Engine::Element;
  using Layout = SwizzledRows<kFeatures / 8>;
  static constexpr int kUnitsPerRow = kFeatures / 8;
  static constexpr int kReads = kRows * kUnitsPerRow / kThreads;
  static constexpr int kRowStep = kThreads / kUnitsPerRow;
  static_assert(kRows * kUnitsPerRow % kThreads == 0 && kThreads % kUnitsPerRow == 0, "threads share a tile evenly");
  static_assert(kRows % Engine::kTile == 0 && kFeatures % Engine::kFeatureStep == 0, "whole matrix operands");

 public:
  static constexpr int kBytes = kRows * kFeatures * 2;

  FA_DEVICE explicit RowTile(char* lds) : lds_(lds) {}

  // Starts reading rows [0, kRows) of `rows`.
  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    const int unit = thread_index() % kUnitsPerRow, row = thread_index() / kUnitsPerRow;
    const auto step_of = [](int i) { return i * kRowStep; };
    if (kMayBeIrregular && !rows.regular) return load_irregular(held_, rows, row, step_of, unit * 8);
    load_regular(held_, rows, kRows, row, step_of, unit * 8);
  }

  // Writes them to LDS, which no wave may still be reading.
  FA_DEVICE void commit() {
    const int unit = thread_index() % kUnitsPerRow, row = thread_index() / kUnitsPerRow;
    FA_UNROLL
    for (int i = 0; i < kReads; ++i) store(lds_ + Layout::offset(row + i * kRowStep, unit), held_[i]);
  }

  // Rows [tile * kTile, ..), features [step * kStep, ..).
  FA_DEVICE typename Engine::Operand operand(int tile, int step) const {
    return load_operand<Engine, Layout>(lds_, tile, step, Engine::operand_row());
  }

 private:
  char* lds_;
  Unit held_[kReads];
};

// kRows x kFeatures, for products that contract over rows.
template <class Engine, int kRows, int kFeatures, int kThreads>
class ColumnTile {
  using T = typename Engine::Element;
  using Layout = SwizzledRows<kRows / 8>;
  static constexpr int kUnits = kRows / 8;  // per feature
  // A thread transposes blocks of 8 rows x kWidth features.
  static constexpr int kUnitsPerThread = kUnits * kFeatures / kThreads;
  static constexpr int kWidth = min_of(8, max_of(2, kUnitsPerThread));
  static constexpr int kBlocksPerRow = kFeatures / kWidth;
  static constexpr int kBlocks = kUnits * kBlocksPerRow / kThreads;
  static constexpr int kUnitStep = kThreads / kBlocksPerRow;
  static_assert(kBlocks * kThreads == kUnits * kBlocksPerRow && kThreads % kBlocksPerRow == 0,
                "threads share a tile evenly");
  static_assert(kRows % Engine::kRowStep == 0 && kFeatures % Engine::kTile == 0, "whole matrix operands");
  using Words = Vec<u32, kWidth / 2>;

 public:
  static constexpr int kBytes = kRows * kFeatures * 2;

  FA_DEVICE explicit ColumnTile(char* lds) : lds_(lds) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    const int feature = thread_index() % kBlocksPerRow * kWidth;
    if (kMayBeIrregular && !rows.regular) return load_irregular(held_, rows, row_of_thread(), step_of, feature);
    load_regular(held_, rows, kRows, row_of_thread(), step_of, feature);
  }

  FA_DEVICE void commit() {
    const int feature = thread_index() % kBlocksPerRow * kWidth;
    FA_UNROLL
    for (int b = 0; b < kBlocks; ++b) FA_UNROLL
    for (int f = 0; f < kWidth; ++f) {
      Unit column;
      FA_UNROLL
      for (int e = 0; e < 8; e += 2) {
        const u32 low = held_[8 * b + e][f / 2], high = held_[8 * b + e + 1][f / 2];
        column[e / 2] = f % 2 ? join_high(low, high) : join_low(low, high);
      }
      store(lds_ + Layout::offset(feature + f, unit_of(b)), column);
    }
  }
  // The same rows as a RowTile at `lds` lays them out.
  FA_DEVICE void commit_rows(char* lds) const {
    using RowLayout = SwizzledRows<kFeatures / 8>;
    const int feature = thread_index() % kBlocksPerRow * kWidth;
    FA_UNROLL
    for (int i = 0; i < 8 * kBlocks; ++i)
      store(lds + RowLayout::offset(row_of_thread() + step_of(i), feature / 8) + feature % 8 * 2, held_[i]);
  }

  // Features [tile * kTile, ..); rows in the order of pack() of the scores' registers [step * 8, ..).
  FA_DEVICE typename Engine::Operand operand(int tile, int step) const {
    return load_operand<Engine, Layout>(lds_, tile, step, Engine::operand_row());
  }

 private:
  FA_DEVICE static int unit_of(int block) { return thread_index() / kBlocksPerRow + block * kUnitStep; }
  // Element e of a unit holds the row that register 8 * (unit / kGroups) + e of lane group unit % kGroups stands for in
  // a score tile: row_of_thread() + step_of(8 * block + e).
  FA_DEVICE static int row_of_thread() {
    const int unit = unit_of(0);
    return unit / Engine::kGroups * Engine::kRowStep + Engine::streamed_of_group(unit % Engine::kGroups);
  }
  static constexpr int step_of(int i) {
    return i / 8 * kUnitStep / Engine::kGroups * Engine::kRowStep + Engine::streamed_of_register(i % 8);
  }
  static_assert(kBlocks == 1 || kUnitStep % Engine::kGroups == 0, "a thread's blocks belong to one lane group");

  char* lds_;
  Words held_[8 * kBlocks];
};

// A tile that is fetched while its predecessor is used. `commit` replaces what all waves must have read; after a
// barrier the new rows are there.
template <class Engine, int kRows, int kFeatures, int kThreads, Use kUse>
class StreamTile {
  using T = typename Engine::Element;
  using RowView = RowTile<Engine, kRows, kFeatures, kThreads>;
  using ColumnView = ColumnTile<Engine, kRows, kFeatures, kThreads>;
  static constexpr int kColumnBytes = kUse == Use::rows ? 0 : ColumnView::kBytes;

 public:
  static constexpr int kBytes = kColumnBytes + (kUse == Use::columns ? 0 : RowView::kBytes);
  static constexpr bool kCommitOverwrites = true;

  FA_DEVICE explicit StreamTile(char* lds) : row_lds_(lds + kColumnBytes), rows_(row_lds_), columns_(lds) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    if constexpr (kUse == Use::rows)
      rows_.template fetch<kMayBeIrregular>(rows);
    else
      columns_.template fetch<kMayBeIrregular>(rows);
  }
  FA_DEVICE void commit() {
    if constexpr (kUse == Use::rows) return rows_.commit();
    if constexpr (kUse == Use::both) columns_.commit_rows(row_lds_);
    columns_.commit();
  }
  FA_DEVICE const RowView& rows() const { return rows_; }
  FA_DEVICE const ColumnView& columns() const { return columns_; }

 private:
  char* row_lds_;
  RowView rows_;
  ColumnView columns_;
};

// The rows that a wave keeps: kTiles * kTile of them, as operands in registers.
template <class Engine, int kTiles, int kFeatures>
class KeptRows {
  using T = typename Engine::Element;

 public:
  static constexpr int kBytesPerWave = 0;
  FA_DEVICE explicit KeptRows(char*) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    const int lane = lane_index();
    FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) FA_UNROLL
    for (int step = 0; step < kSteps; ++step)
      held_[tile][step] = load_padded<kMayBeIrregular, 4>(rows, tile * Engine::kTile + lane % Engine::kTile,
                                                          step * Engine::kFeatureStep + lane / Engine::kTile * 8);
  }
  FA_DEVICE Unit operand(int tile, int step) const { return held_[tile][step]; }

 private:
  static constexpr int kSteps = kFeatures / Engine::kFeatureStep;
  Unit held_[kTiles][kSteps];
};

// The same in LDS, where registers are short.
template <class Engine, int kTiles, int kFeatures>
class KeptInLds : public KeptLdsRows<typename Engine::Element, kTiles * Engine::kTile, kFeatures> {
  using Base = KeptLdsRows<typename Engine::Element, kTiles * Engine::kTile, kFeatures>;

 public:
  using Base::Base;
  FA_DEVICE typename Engine::Operand operand(int tile, int step) const {
    return load_operand<Engine, typename Base::Layout>(this->lds_, tile, step, Engine::kept_of_lane());
  }
};

}  // namespace flash_attn::gpu
