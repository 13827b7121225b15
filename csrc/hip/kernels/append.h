// What a call with a cache does before it attends: new keys, rotated, and values go to their slots, and queries are
// rotated. Nothing is written where a sequence has no slot, whatever lengths and tables say.
#pragma once

#include "hip/kernels/key_storage.h"

namespace flash_attn::gpu {

// A block does a row of all heads: of new keys and values, then of queries.
template <class Plan>
class Append {
  using T = typename Plan::Engine::Element;

 public:
  static constexpr int kLdsBytes = 16;

  FA_DEVICE static void run(const AppendArgs& args, char*) {
    const AttentionArgs& a = args.attention;
    const int b = int(block_index() / u32(a.tiles)), row = int(block_index() % u32(a.tiles));
    const Append append(args, slots_before(a, args.keys, b));
    if (row < args.new_rows)
      append.key(b, row);
    else
      append.query(b, row - args.new_rows);
  }

 private:
  // The heads of a row: head h begins at data + h * stride.
  struct Heads {
    T* data;
    index_t stride;
  };

  FA_DEVICE Append(const AppendArgs& args, int before) : args_(args), a_(args.attention), before_(before) {}

  FA_DEVICE void key(int b, int row) const {
    const int slot = before_ + row;
    T* const k = slot_of<T>(args_.keys, a_.k, a_.Sk, b, slot);
    T* const v = slot_of<T>(args_.keys, a_.v, a_.Sk, b, slot);
    if (!k || !v) return;
    rotate(heads_of(args_.k_new, b, row), {k, a_.k.head_stride}, a_.Hk, slot);
    copy(heads_of(args_.v_new, b, row), {v, a_.v.head_stride}, a_.Hk, 0, a_.Dv);
  }
  FA_DEVICE void query(int b, int row) const {
    rotate(heads_of(a_.q, b, row), heads_of(args_.rotated, b, row), a_.H, before_ + (args_.position_per_row ? row : 0));
  }

  FA_DEVICE static Heads heads_of(const TensorArg& x, int b, int row) {
    return {static_cast<T*>(x.data) + b * x.batch_stride + row * x.row_stride, x.head_stride};
  }

  // As rotate_row of cpu/rotary_rows.h: what the tables have no position for is copied. `to` may be `from`.
  FA_DEVICE void rotate(Heads from, Heads to, int heads, int position) const {
    const int half = position < args_.positions ? args_.half : 0;
    const T* const cos = static_cast<const T*>(args_.cos) + index_t(position) * half;
    const T* const sin = static_cast<const T*>(args_.sin) + index_t(position) * half;
    for (int n = thread_index(); n < heads * half; n += Plan::kThreads) {
      const int head = n / half, pair = n - head * half;
      const int first = args_.interleaved ? 2 * pair : pair, second = args_.interleaved ? first + 1 : pair + half;
      const T* const x = from.data + head * from.stride;
      T* const y = to.data + head * to.stride;
      const float left = widen(x[first]), right = widen(x[second]), c = widen(cos[pair]), s = widen(sin[pair]);
      y[first] = narrow<T>(left * c - right * s);
      y[second] = narrow<T>(left * s + right * c);
    }
    copy(from, to, heads, 2 * half, a_.D);
  }

  // Features [first, end).
  FA_DEVICE static void copy(Heads from, Heads to, int heads, int first, int end) {
    const int features = end - first;
    for (int n = thread_index(); n < heads * features; n += Plan::kThreads) {
      const int head = n / features, feature = first + n - head * features;
      to.data[head * to.stride + feature] = from.data[head * from.stride + feature];
    }
  }

  const AppendArgs& args_;
  const AttentionArgs& a_;
  int before_;  // Slots in use before the new keys.
};

}  // namespace flash_attn::gpu
