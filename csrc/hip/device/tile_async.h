// Tiles of K, V, Q, dO copied asynchronously from global memory to LDS (shared memory), read with ldmatrix. A row tile
// and a column tile have the same bytes: ldmatrix transposes when asked.
#pragma once

#include "hip/device/rows.h"

namespace flash_attn::gpu {

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
FA_DEVICE Unit load_matrices(const char* lds) {
  const u32 from = u32(__cvta_generic_to_shared(lds));
  Unit x;
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
  return x;
}

template <class Engine, int kRows, int kFeatures, int kThreads, bool kColumns>
class AsyncTile {
  using T = typename Engine::Element;
  static constexpr int kUnitsPerRow = kFeatures / 8;
  using Layout = SwizzledRows<kUnitsPerRow>;
  static constexpr int kCopies = kRows * kUnitsPerRow / kThreads;
  static constexpr int kRowStep = kThreads / kUnitsPerRow;
  static_assert(kRows * kUnitsPerRow % kThreads == 0 && kThreads % kUnitsPerRow == 0, "threads share a tile evenly");
  static_assert(kRows % 16 == 0 && kFeatures % 16 == 0, "whole matrix operands");

 public:
  static constexpr int kBytes = kRows * kFeatures * 2;

  FA_DEVICE explicit AsyncTile(char* lds) : lds_(lds) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    const int unit = thread_index() % kUnitsPerRow, row = thread_index() / kUnitsPerRow;
    const auto source = [&](int i) {
      const int r = min_of(row + i * kRowStep, rows.count - 1);
      return kMayBeIrregular ? rows.row(r) : rows.data + r * rows.stride;
    };
    if (kMayBeIrregular && !rows.regular && !rows.pages.aligned) {
      FA_UNROLL
      for (int i = 0; i < kCopies; ++i)
        store(lds_ + Layout::offset(row + i * kRowStep, unit), load_irregular<T, 4>(rows, source(i), unit * 8));
      return;
    }
    const int feature = unit * 8 < rows.features ? unit * 8 : 0;
    FA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      const u32 to = u32(__cvta_generic_to_shared(lds_ + Layout::offset(row + i * kRowStep, unit)));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source(i) + feature) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  FA_DEVICE void commit() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  // A row tile: rows [tile * 16, ..), features [step * 16, ..). A column tile: features [tile * 16, ..), rows [step *
  // 16, ..).
  FA_DEVICE Unit operand(int tile, int step) const {
    const int lane = lane_index(), matrix = lane / 8, i = lane % 8;
    const int row = kColumns ? step * 16 + matrix % 2 * 8 + i : tile * 16 + matrix / 2 * 8 + i;
    const int unit = kColumns ? tile * 2 + matrix / 2 : step * 2 + matrix % 2;
    return load_matrices<kColumns>(lds_ + Layout::offset(row, unit));
  }

 private:
  char* lds_;
};

template <class Engine, int kRows, int kFeatures, int kThreads>
struct RowTile : AsyncTile<Engine, kRows, kFeatures, kThreads, false> {
  using AsyncTile<Engine, kRows, kFeatures, kThreads, false>::AsyncTile;
};
template <class Engine, int kRows, int kFeatures, int kThreads>
struct ColumnTile : AsyncTile<Engine, kRows, kFeatures, kThreads, true> {
  using AsyncTile<Engine, kRows, kFeatures, kThreads, true>::AsyncTile;
};

// A tile that is fetched while its predecessor is used: two buffers. `commit` waits for the copies; after a barrier the
// new rows are there.
template <class Engine, int kRows, int kFeatures, int kThreads, Use kUse>
class StreamTile {
  using T = typename Engine::Element;
  using RowView = AsyncTile<Engine, kRows, kFeatures, kThreads, false>;
  using ColumnView = AsyncTile<Engine, kRows, kFeatures, kThreads, true>;

 public:
  static constexpr int kBytes = 2 * RowView::kBytes;
  static constexpr bool kCommitOverwrites = false;

  FA_DEVICE explicit StreamTile(char* lds) : lds_(lds) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    RowView(lds_ + (1 - current_) * RowView::kBytes).template fetch<kMayBeIrregular>(rows);
  }
  FA_DEVICE void commit() {
    RowView(lds_).commit();
    current_ = 1 - current_;
  }
  FA_DEVICE RowView rows() const { return RowView(lds_ + current_ * RowView::kBytes); }
  FA_DEVICE ColumnView columns() const { return ColumnView(lds_ + current_ * RowView::kBytes); }

 private:
  char* lds_;
  int current_ = 0;
};

// The rows that a wave keeps: kTiles * 16 of them, as operands in registers.
template <class Engine, int kTiles, int kFeatures>
class KeptRows {
  using T = typename Engine::Element;
  static constexpr int kSteps = kFeatures / 16;

 public:
  static constexpr int kBytesPerWave = 0;
  FA_DEVICE explicit KeptRows(char*) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    const int row = lane_index() / 4, pair = lane_index() % 4 * 2;
    FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) FA_UNROLL
    for (int step = 0; step < kSteps; ++step) FA_UNROLL
    for (int part = 0; part < 4; ++part)
      held_[tile][step][part] =
          load_padded<kMayBeIrregular, 1>(rows, tile * 16 + row + part % 2 * 8, step * 16 + pair + part / 2 * 8)[0];
  }
  FA_DEVICE const Unit& operand(int tile, int step) const { return held_[tile][step]; }

 private:
  Unit held_[kTiles][kSteps];
};

// The same in LDS, where registers are short.
template <class Engine, int kTiles, int kFeatures>
class KeptInLds : public KeptLdsRows<typename Engine::Element, kTiles * 16, kFeatures> {
  using Base = KeptLdsRows<typename Engine::Element, kTiles * 16, kFeatures>;

 public:
  using Base::Base;
  FA_DEVICE Unit operand(int tile, int step) const {
    const int lane = lane_index(), matrix = lane / 8;
    return load_matrices<false>(this->lds_ +
                                Base::Layout::offset(tile * 16 + matrix % 2 * 8 + lane % 8, step * 2 + matrix / 2));
  }
};

}  // namespace flash_attn::gpu
