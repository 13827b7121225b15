// The floor: fused multiply-adds on any GPU and for any element type, operands from LDS. The same contract as the
// matrix engines (see engine_amd.h). fp32 uses it everywhere; 16-bit types on targets without matrix instructions.
//
// The lanes of a wave form a grid of kWave / 4 kept rows x 4 groups of streamed rows. A lane owns kKeptPerLane kept
// rows and, of every 16 streamed rows (or output features), four in a run.
#pragma once

#include "hip/device/rows.h"

namespace flash_attn::gpu {

// Four numbers in fp32 from 4 consecutive elements.
template <class T>
using FourWords = Vec<u32, int(sizeof(T))>;
template <class T>
FA_DEVICE Vec<float, 4> widen_four(FourWords<T> words) {
  if constexpr (sizeof(T) == 4) {
    return bit_cast<Vec<float, 4>>(words);
  } else {
    Vec<float, 4> x;
    FA_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = widen(T{u16(words[i / 2] >> (16 * (i % 2)))});
    return x;
  }
}

// Rows of kFeatures elements in LDS. Padded by 16 bytes for lanes that read one feature of several rows; offsets stay
// linear, so that every read of a product is one lane address and an immediate.
template <class T, int kFeatures, bool kPadded>
struct FmaRows {
  static constexpr int kRowBytes = kFeatures * int(sizeof(T)) + (kPadded ? 16 : 0);
  static constexpr int kUnitsPerRow = kFeatures * int(sizeof(T)) / 16;
  const char* lds;
  FA_DEVICE static int offset(int row, int unit) { return row * kRowBytes + unit * 16; }
  FA_DEVICE Vec<float, 4> four(int row, int feature) const {
    return widen_four<T>(load<FourWords<T>>(lds + row * kRowBytes + feature * int(sizeof(T))));
  }
};

template <class T, int kTileSize>
struct Fma {
  using Element = T;
  static constexpr int kTile = kTileSize, kKeptLanes = kWave / 4;
  static constexpr int kKeptPerLane = kTile / kKeptLanes, kRuns = kTile / 16;
  static constexpr int kKeptLaneStride = 1, kPack = 4 * kKeptPerLane, kRegisters = kPack * kRuns;
  static constexpr int kFeatureStep = 4, kRowStep = 16, kRun = 4;
  static constexpr int kUnrolledSteps = FA_AMD ? 8 : 64;  // clang takes minutes for more
  static_assert(kTile % 16 == 0 && kTile % kKeptLanes == 0, "16 or 32");

  using Accumulator = Vec<float, kRegisters>;
  struct Weights {
    float of[kKeptPerLane][kRowStep];
  };

  static constexpr int streamed_of_register(int r) { return r / kPack * 16 + r % 4; }
  FA_DEVICE static int streamed_of_lane() { return lane_index() / kKeptLanes * 4; }
  static constexpr int kept_slot(int r) { return r / 4 % kKeptPerLane; }
  static constexpr int register_of_slot(int slot, int n) { return n / 4 * kPack + slot * 4 + n % 4; }
  static constexpr int kept_of_slot(int slot) { return slot * kKeptLanes; }
  FA_DEVICE static int kept_of_lane() { return lane_index() % kKeptLanes; }

  FA_DEVICE static Accumulator zero() {
    Accumulator x;
    FA_UNROLL
    for (int r = 0; r < kRegisters; ++r) x[r] = 0;
    return x;
  }
  // Every lane's four weights to the lanes of the same kept rows.
  FA_DEVICE static Weights pack(const float (&p)[kPack]) {
    Weights w;
    FA_UNROLL
    for (int slot = 0; slot < kKeptPerLane; ++slot) FA_UNROLL
    for (int row = 0; row < kRowStep; ++row)
      w.of[slot][row] = from_lane(p[slot * 4 + row % 4], row / 4 * kKeptLanes + kept_of_lane());
    return w;
  }
  template <class Op>
  FA_DEVICE static float fold(float x, Op op) {
    x = op(x, from_lane(x, lane_index() ^ kKeptLanes));
    return op(x, from_lane(x, lane_index() ^ (2 * kKeptLanes)));
  }

  template <class Streamed, class Kept>
  FA_DEVICE static void scores(Accumulator& s, const Streamed& streamed, const Kept& kept) {
    Vec<float, 4> k[kKeptPerLane];
    FA_UNROLL
    for (int slot = 0; slot < kKeptPerLane; ++slot) k[slot] = kept.row(kept_of_slot(slot) + kept_of_lane());
    FA_UNROLL
    for (int r = 0; r < kRegisters; ++r) {
      if (kept_slot(r) != 0) continue;
      const Vec<float, 4> x = streamed.row(streamed_of_register(r) + streamed_of_lane());
      FA_UNROLL
      for (int slot = 0; slot < kKeptPerLane; ++slot) {
        // Four products by themselves, for the same reason as in accumulate().
        float part = x[0] * k[slot][0];
        FA_UNROLL
        for (int i = 1; i < 4; ++i) part = fma(x[i], k[slot][i], part);
        s[r + 4 * slot] += part;
      }
    }
    complete(s);
  }
  template <class Columns>
  FA_DEVICE static void accumulate(Accumulator& o, const Columns& columns, const Weights& weights) {
    // A step is summed by itself: one long chain of fp32 additions rounds more than plain matrix products do.
    Accumulator part = zero();
    FA_UNROLL
    for (int row = 0; row < kRowStep; ++row) {
      FA_UNROLL
      for (int run = 0; run < kRuns; ++run) {
        const Vec<float, 4> x = columns.four(row, run * 16 + streamed_of_lane());
        FA_UNROLL
        for (int slot = 0; slot < kKeptPerLane; ++slot) FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int r = run * kPack + slot * 4 + i;
          part[r] = fma(x[i], weights.of[slot][row], part[r]);
        }
      }
      if (row % 4 == 3) complete(part);
    }
    FA_UNROLL
    for (int r = 0; r < kRegisters; ++r) o[r] += part[r];
    // Before the next step begins: with the parts of several at once clang-22 spills on gfx1201.
    complete(o);
  }

 private:
  FA_DEVICE static void complete(Accumulator& c) {
    FA_UNROLL
    for (int r = 0; r < kRegisters; ++r) {
      float x = c[r];
      finish_before(x);
      c[r] = x;
    }
  }
};

template <class T, int kRows, int kFeatures, int kThreads, bool kPadded>
class FmaTile {
  using Lds = FmaRows<T, kFeatures, kPadded>;
  static constexpr int kReads = kRows * Lds::kUnitsPerRow / kThreads;
  static_assert(kReads * kThreads == kRows * Lds::kUnitsPerRow, "threads share a tile evenly");

 public:
  static constexpr int kBytes = kRows * Lds::kRowBytes;
  struct RowOperand {
    Lds rows;
    int first, feature;
    FA_DEVICE Vec<float, 4> row(int r) const { return rows.four(first + r, feature); }
  };
  struct ColumnOperand {
    Lds rows;
    int first, feature;
    FA_DEVICE Vec<float, 4> four(int r, int f) const { return rows.four(first + r, feature + f); }
  };

  FA_DEVICE explicit FmaTile(char* lds) : lds_(lds) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    FA_UNROLL
    for (int i = 0; i < kReads; ++i)
      held_[i] = load_clamped<kMayBeIrregular, 4>(rows, row_of(i), unit_of(i) * kUnitElements<T>);
  }
  FA_DEVICE void commit() {
    FA_UNROLL
    for (int i = 0; i < kReads; ++i) store(lds_ + Lds::offset(row_of(i), unit_of(i)), held_[i]);
  }

 protected:
  char* lds_;

 private:
  FA_DEVICE static int row_of(int i) { return (thread_index() + i * kThreads) / Lds::kUnitsPerRow; }
  FA_DEVICE static int unit_of(int i) { return (thread_index() + i * kThreads) % Lds::kUnitsPerRow; }
  Unit held_[kReads];
};

template <class Engine, int kRows, int kFeatures, int kThreads>
class RowTile;
template <class Engine, int kRows, int kFeatures, int kThreads>
class ColumnTile;
template <class Engine, int kRows, int kFeatures, int kThreads, Use kUse>
class StreamTile;
template <class Engine, int kTiles, int kFeatures>
class KeptRows;
template <class Engine, int kTiles, int kFeatures>
class KeptInLds;
template <class Engine, int kTiles, int kFeatures>
class KeptInGlobal;

template <class T, int N, int kRows, int kFeatures, int kThreads>
class RowTile<Fma<T, N>, kRows, kFeatures, kThreads> : public FmaTile<T, kRows, kFeatures, kThreads, true> {
 public:
  using FmaTile<T, kRows, kFeatures, kThreads, true>::FmaTile;
  FA_DEVICE auto operand(int tile, int step) const {
    return typename RowTile::RowOperand{{this->lds_}, tile * N, step * Fma<T, N>::kFeatureStep};
  }
};
template <class T, int N, int kRows, int kFeatures, int kThreads>
class ColumnTile<Fma<T, N>, kRows, kFeatures, kThreads> : public FmaTile<T, kRows, kFeatures, kThreads, false> {
 public:
  using FmaTile<T, kRows, kFeatures, kThreads, false>::FmaTile;
  FA_DEVICE auto operand(int tile, int step) const {
    return typename ColumnTile::ColumnOperand{{this->lds_}, step * Fma<T, N>::kRowStep, tile * N};
  }
};

// Rows and columns are read from the same bytes.
template <class T, int N, int kRows, int kFeatures, int kThreads, Use kUse>
class StreamTile<Fma<T, N>, kRows, kFeatures, kThreads, kUse> : public FmaTile<T, kRows, kFeatures, kThreads, true> {
  using Base = FmaTile<T, kRows, kFeatures, kThreads, true>;
  struct RowView {
    char* lds;
    FA_DEVICE auto operand(int tile, int step) const {
      return typename Base::RowOperand{{lds}, tile * N, step * Fma<T, N>::kFeatureStep};
    }
  };
  struct ColumnView {
    char* lds;
    FA_DEVICE auto operand(int tile, int step) const {
      return typename Base::ColumnOperand{{lds}, step * Fma<T, N>::kRowStep, tile * N};
    }
  };

 public:
  static constexpr bool kCommitOverwrites = true;
  using Base::Base;
  FA_DEVICE RowView rows() const { return {this->lds_}; }
  FA_DEVICE ColumnView columns() const { return {this->lds_}; }
};

// A wave's kept rows stand in LDS, in a part of its own.
template <class T, int N, int kTiles, int kFeatures>
class KeptRows<Fma<T, N>, kTiles, kFeatures> {
  using Lds = FmaRows<T, kFeatures, true>;

 public:
  static constexpr int kBytesPerWave = kTiles * N * Lds::kRowBytes;
  struct Operand {
    Lds rows;
    int first, feature;
    FA_DEVICE Vec<float, 4> row(int r) const { return rows.four(first + r, feature); }
  };

  FA_DEVICE explicit KeptRows(char* lds) : lds_(lds + wave_index() * kBytesPerWave) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    for (int i = lane_index(); i < kTiles * N * Lds::kUnitsPerRow; i += kWave) {
      const int row = i / Lds::kUnitsPerRow, unit = i % Lds::kUnitsPerRow;
      store(lds_ + Lds::offset(row, unit), load_padded<kMayBeIrregular, 4>(rows, row, unit * kUnitElements<T>));
    }
    wave_fence();
  }
  FA_DEVICE Operand operand(int tile, int step) const { return {{lds_}, tile * N, step * Fma<T, N>::kFeatureStep}; }

 private:
  char* lds_;
};

// Where LDS does not hold them either: every operand is read from global memory, which is to say from a cache.
template <class T, int N, int kTiles, int kFeatures>
class KeptInGlobal<Fma<T, N>, kTiles, kFeatures> {
 public:
  static constexpr int kBytesPerWave = 0;
  struct Operand {
    const Rows<T>& rows;
    int first, feature;
    FA_DEVICE Vec<float, 4> row(int r) const {
      return widen_four<T>(load_padded<true, int(sizeof(T))>(rows, first + r, feature));
    }
  };

  FA_DEVICE explicit KeptInGlobal(char*) {}
  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    rows_ = rows;
  }
  FA_DEVICE Operand operand(int tile, int step) const { return {rows_, tile * N, step * Fma<T, N>::kFeatureStep}; }

 private:
  Rows<T> rows_;
};

template <class T, int N, int kTiles, int kFeatures>
class KeptInLds<Fma<T, N>, kTiles, kFeatures> : public KeptRows<Fma<T, N>, kTiles, kFeatures> {
  using KeptRows<Fma<T, N>, kTiles, kFeatures>::KeptRows;
};

}  // namespace flash_attn::gpu
