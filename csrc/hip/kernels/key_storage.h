// Where the keys of a sequence are: in packed or dense tensors, in a cache, or in pages of one. Lengths and tables are
// in GPU memory, where nobody has checked them: whatever they say, nothing outside of the tensors is read or written.
#pragma once

#include "hip/device/engine.h"
#include "hip/kernels/problem.h"

namespace flash_attn::gpu {

// Slots of a sequence with `rows` of its own in k and v.
FA_DEVICE int capacity(const KeyStorageArg& s, int rows) { return s.pages ? s.pages_per_sequence * s.page.size : rows; }

// Of a dense sequence, those in use before the new keys.
FA_DEVICE int slots_before(const AttentionArgs& a, const KeyStorageArg& s, int b) {
  const int slots = capacity(s, a.Sk);
  return s.used ? clamp(s.used[b], 0, slots) : slots;
}

// The slots of sequence b that hold its keys. Pages: counted from its first page.
FA_DEVICE Span stored_keys(const AttentionArgs& a, const KeyStorageArg& s, int b) {
  const Span all = key_span(a, b);
  const int slots = capacity(s, all.count);
  const int used = min_of(clamp(s.used ? s.used[b] : all.count, 0, slots) + s.appended, slots);
  const int padding = s.leftpad ? clamp(s.leftpad[b], 0, used) : 0;
  return {(s.pages ? 0 : all.begin) + padding, used - padding};
}

// The head's keys or values from key `first` of sequence b on.
template <class T>
FA_DEVICE Rows<T> stored_rows(const KeyStorageArg& s, const TensorArg& x, int b, int head, Span keys, int first,
                              int features, bool regular) {
  if (!s.pages) {
    const int element = s.batch_index ? clamp(s.batch_index[b], 0, s.batches - 1) : b;
    return rows_of<T>(x, element, head, keys, first, features, regular);
  }
  const Pages pages{s.pages + b * s.pages_stride, x.batch_stride, s.page, s.batches, keys.begin + first, regular};
  return {
      static_cast<const T*>(x.data) + head * x.head_stride, x.row_stride, keys.count - first, features, false, pages};
}

// Head 0 of slot `slot` of sequence b in a cache with `rows` slots to a batch element; null where there is none.
template <class T>
FA_DEVICE T* slot_of(const KeyStorageArg& s, const TensorArg& x, int rows, int b, int slot) {
  if (slot >= capacity(s, rows)) return nullptr;
  const int n = s.pages ? int(s.page.page_of(u32(slot))) : 0;
  const int element = s.pages ? s.pages[b * s.pages_stride + n] : s.batch_index ? s.batch_index[b] : b;
  if (element < 0 || element >= s.batches) return nullptr;
  return static_cast<T*>(x.data) + element * x.batch_stride + index_t(slot - n * s.page.size) * x.row_stride;
}

}  // namespace flash_attn::gpu
