// What ranges of keys give together: each weighs as much as its sum of exponentials (FlashAttention-2's split keys, as
// in Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
#pragma once

#include "hip/device/engine.h"
#include "hip/kernels/problem.h"

namespace flash_attn::gpu {

// A wave does kWave features of a row. A lane weighs some of the ranges.
template <class Plan>
class Combine {
  using T = typename Plan::Engine::Element;
  static constexpr int kPerLane = kMostSplits / kWave;
  static_assert(kMostSplits % kWave == 0, "lanes share the ranges evenly");

 public:
  static constexpr int kLdsBytes = 16;

  FA_DEVICE static void run(const CombineArgs& args, char*) {
    // In 32 bits, as a launch has no more threads.
    const u32 wave = block_index() * u32(Plan::kWaves) + u32(wave_index()), row = wave / u32(args.waves_per_row);
    if (row < args.splits.rows) Combine(args, row).merge(int(wave - row * u32(args.waves_per_row)));
  }

 private:
  FA_DEVICE Combine(const CombineArgs& args, u32 row) : args_(args), s_(args.splits), row_(row) {}

  FA_DEVICE void merge(int part) {
    float lse[kPerLane], top = -kInf;
    bool not_empty = false;
    FA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int n = lane_index() + i * kWave;
      lse[i] = n < s_.count ? s_.lse[n * s_.rows + row_] : -kInf;
      top = maximum(top, lse[i]);
      // Opaque: clang would make a comparison of numbers of it, and take NaN for an empty range.
      not_empty |= opaque(bit_cast<int>(lse[i])) != bit_cast<int>(-kInf);
    }
    top = over_lanes(top, [](float a, float b) { return maximum(a, b); });
    float sum = 0;
    FA_UNROLL
    for (int i = 0; i < kPerLane; ++i) sum += weight_[i] = exp2((lse[i] - top) * float(kLog2e));
    sum = over_lanes(sum, [](float a, float b) { return a + b; });
    const bool none = !any(not_empty);
    const int feature = part * kWave + lane_index();
    const float value = weighted_sum(min_of(feature, args_.Dv - 1));
    if (feature < args_.Dv) out(feature) = narrow<T>(none ? 0.0f : reciprocal(sum) * value);
    if (feature == 0) args_.lse[row_] = none ? kInf : top + log2(sum) * float(kLn2);
  }

  template <class F>
  FA_DEVICE static float over_lanes(float x, F f) {
    FA_UNROLL
    for (int distance = 1; distance < kWave; distance *= 2) x = f(x, from_lane(x, lane_index() ^ distance));
    return x;
  }

  FA_DEVICE float weighted_sum(int feature) const {
    float sum = 0;
    FA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      // Reads of kAhead ranges are in flight together; what is in excess has no weight.
      constexpr int kAhead = 8;
      for (int first = i * kWave; first < min_of(s_.count, (i + 1) * kWave); first += kAhead) FA_UNROLL
      for (int n = first; n < first + kAhead; ++n) {
        const float w = from_lane(weight_[i], n % kWave);
        const float x = s_.out[(min_of(n, s_.count - 1) * s_.rows + row_) * args_.Dv + feature];
        // A range without keys has written nothing.
        sum = w != 0 ? fma(w, x, sum) : sum;
      }
    }
    return sum;
  }

  FA_DEVICE T& out(int feature) const {
    const u32 head = row_ / u32(args_.rows), b = head / u32(args_.heads);
    const TensorArg& x = args_.out;
    return static_cast<T*>(x.data)[b * x.batch_stride + (row_ - head * u32(args_.rows)) * x.row_stride +
                                   (head - b * u32(args_.heads)) * x.head_stride + feature];
  }

  const CombineArgs& args_;
  const SplitsArg& s_;
  u32 row_;
  float weight_[kPerLane];
};

}  // namespace flash_attn::gpu
