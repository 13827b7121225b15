// Rows of a tensor in global memory, and a swizzled arrangement of rows in LDS.
//
// Head dims are padded to tile widths when loading. Nothing outside the tensor is read: a row past the end reads the
// last row, a unit past the features reads the first one. What comes of it is masked (scores of keys past the end,
// output features past Dv) or multiplied by a zero, which makes NaN of an infinity (docs/decisions.md): callers that
// need zeros past the features ask for them (`padded`).
#pragma once

#include "hip/device/convert.h"
#include "hip/page_size.h"

namespace flash_attn::gpu {

// Rows that lie in pages: the sequence's table has the pages' numbers, of which there are `count`.
struct Pages {
  const std::int32_t* table = nullptr;  // Null: rows lie one after another.
  index_t stride = 0;                   // From a page to the next, in elements.
  PageSize size = {};
  int count = 1;
  int first_slot = 0;    // Where row 0 is.
  bool aligned = false;  // As Rows::regular, of each row by itself.
};

// `count` rows (at least 1) of `features` elements. `regular`: 16-byte aligned in base, stride and length, a tile of
// rows spans less than 2^31 bytes, and they lie one after another.
template <class T>
struct Rows {
  const T* data;
  index_t stride;
  int count, features;
  bool regular;
  Pages pages = {};

  // Whatever the table says, it is a row of the tensor.
  FA_DEVICE const T* row(int r) const {
    if (!pages.table) return data + r * stride;
    // Opaque: clang 22 would keep what follows of every row for the whole main loop, and WMMA kernels would spill.
    const u32 slot = u32(pages.first_slot + opaque(r)), n = pages.size.page_of(slot);
    const int page = max_of(0, min_of(int(pages.table[n]), pages.count - 1));
    return data + page * pages.stride + index_t(slot - n * u32(pages.size.size)) * stride;
  }
};

// kWords words of the row at p from feature `feature` on, element by element where they are not aligned. Past the last
// feature comes the last feature again, or the first ones.
template <class T, int kWords>
FA_DEVICE Vec<u32, kWords> load_irregular(const Rows<T>& rows, const T* p, int feature) {
  if (rows.pages.aligned) return load<Vec<u32, kWords>>(p + (feature < rows.features ? feature : 0));
  const auto element = [&](int i) { return p[min_of(feature + i, rows.features - 1)]; };
  Vec<u32, kWords> words;
  FA_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(T) == 4)
      words[w] = bit_cast<u32>(element(w));
    else
      words[w] = u32(element(2 * w).bits) | u32(element(2 * w + 1).bits) << 16;
  }
  return words;
}

// kWords words of a row; whatever finite past the features.
template <bool kMayBeIrregular, int kWords, class T>
FA_DEVICE Vec<u32, kWords> load_clamped(const Rows<T>& rows, int row, int feature) {
  if (kMayBeIrregular && !rows.regular)
    return load_irregular<T, kWords>(rows, rows.row(min_of(row, rows.count - 1)), feature);
  const int inside = feature < rows.features ? feature : 0;
  return load<Vec<u32, kWords>>(rows.data + min_of(row, rows.count - 1) * rows.stride + inside);
}

// kWords words of a row; zeros past the features.
template <bool kMayBeIrregular, int kWords, class T>
FA_DEVICE Vec<u32, kWords> load_padded(const Rows<T>& rows, int row, int feature) {
  constexpr int kPerWord = 4 / int(sizeof(T));
  auto words = load_clamped<kMayBeIrregular, kWords>(rows, row, feature);
  FA_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if (!kMayBeIrregular || rows.regular) {
      words[w] = feature < rows.features ? words[w] : 0u;
    } else {
      const int valid = rows.features - feature - w * kPerWord;  // elements of this word
      words[w] = valid >= kPerWord ? words[w] : valid == 1 ? words[w] & 0xffffu : 0u;
    }
  }
  return words;
}

// Writes kRun successive features, those below rows.features.
template <class T, int kRun>
FA_DEVICE void store_run(const Rows<T>& rows, int row, int feature, const float (&x)[kRun]) {
  T* const p = const_cast<T*>(rows.data) + row * rows.stride + feature;
  if (!rows.regular) {
    FA_UNROLL
    for (int i = 0; i < kRun; ++i)
      if (feature + i < rows.features) p[i] = narrow<T>(x[i]);
    return;
  }
  constexpr int kWords = kRun * int(sizeof(T)) / 4;
  Vec<u32, kWords> words;
  FA_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(T) == 4)
      words[w] = bit_cast<u32>(x[w]);
    else
      words[w] = narrow_pair<T>(x[2 * w], x[2 * w + 1]);
  }
  store(p, words);
}

// Reads kReads regular pieces of type V: feature `feature` of row row_of(i), i < kReads. Full tiles need one 32-bit
// offset per lane, the rest of the address is scalar; only a tile that hangs over the end clamps. row_of is base(lane)
// + step(i).
template <int kReads, class V, class T, class Step>
FA_DEVICE void load_regular(V (&to)[kReads], const Rows<T>& rows, int tile_rows, int row, Step step, int feature) {
  const char* const base = reinterpret_cast<const char*>(rows.data);
  const index_t stride = rows.stride * int(sizeof(T));
  const u32 lane = u32(feature < rows.features ? feature : 0) * u32(sizeof(T));
  if (rows.count >= tile_rows) {
    const u32 offset = u32(row) * u32(stride) + lane;
    FA_UNROLL
    for (int i = 0; i < kReads; ++i) to[i] = load<V>(base + step(i) * stride + offset);
  } else {
    FA_UNROLL
    for (int i = 0; i < kReads; ++i)
      to[i] = load<V>(base + (u32(min_of(row + step(i), rows.count - 1)) * u32(stride) + lane));
  }
}

// The same pieces where rows are irregular: first where all are, since of pages that is read from a table.
template <int kReads, int kWords, class T, class Step>
FA_DEVICE void load_irregular(Vec<u32, kWords> (&to)[kReads], const Rows<T>& rows, int row, Step step, int feature) {
  const T* at[kReads];
  FA_UNROLL
  for (int i = 0; i < kReads; ++i) at[i] = rows.row(min_of(row + step(i), rows.count - 1));
  FA_UNROLL
  for (int i = 0; i < kReads; ++i) to[i] = load_irregular<T, kWords>(rows, at[i], feature);
}

// Rows of kUnits units in LDS. Unit u of row r stands at u ^ s(r): lanes that read one unit of successive rows, and
// lanes that write successive units of one row, meet 8 different groups of 4 banks. s(r) also mixes in r / 8, so that
// writes that stride 2 or 4 rows (a transposing store) spread too.
template <int kUnits>
struct SwizzledRows {
  static_assert(kUnits >= 2 && (kUnits & (kUnits - 1)) == 0, "a row is a power of two of units, at least 32 bytes");
  FA_DEVICE static int swizzle(int row) {
    if constexpr (kUnits >= 8) return (row ^ (row >> 3)) & 7;
    if constexpr (kUnits == 4) return ((row >> 1) ^ (row >> 3)) & 3;
    return ((row >> 2) ^ (row >> 3)) & 1;
  }
  FA_DEVICE static int offset(int row, int unit) { return (row * kUnits + (unit ^ swizzle(row))) * 16; }
  // Bits of an offset that the swizzle changes: it is linear, so that offset(first + row, unit), where `first` is a
  // multiple of 16 and row is less, is offset(row, 0) with these bits of offset(first, unit) flipped and the others
  // added.
  static constexpr int kSwizzledBytes = min_of(kUnits, 8) * 16;
};

// What a streamed tile is read as: rows for products that contract over features, columns for those that contract over
// rows.
enum class Use : std::uint8_t { rows, columns, both };

// A wave's kRows kept rows of 16-bit elements in a part of LDS of its own.
template <class T, int kRows, int kFeatures>
class KeptLdsRows {
 public:
  static constexpr int kBytesPerWave = kRows * kFeatures * 2;
  FA_DEVICE explicit KeptLdsRows(char* lds) : lds_(lds + wave_index() * kBytesPerWave) {}

  template <bool kMayBeIrregular>
  FA_DEVICE void fetch(const Rows<T>& rows) {
    for (int i = lane_index(); i < kRows * kUnits; i += kWave) {
      const int row = i / kUnits, unit = i % kUnits;
      store(lds_ + Layout::offset(row, unit), load_padded<kMayBeIrregular, 4>(rows, row, unit * 8));
    }
    wave_fence();
  }

 protected:
  static constexpr int kUnits = kFeatures / 8;
  using Layout = SwizzledRows<kUnits>;
  char* lds_;
};

}  // namespace flash_attn::gpu
