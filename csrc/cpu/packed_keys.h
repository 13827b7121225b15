// K and V of one (sequence, key head) as the B operands of scores and output, block by block of keys.
#pragma once

#include "cpu/paired_products.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// Keys that one worker packs at a time.
inline constexpr index_t kPackedKeys = 128;

template <class Target>
class PackedKeys {
  using Elem = typename Target::Elem;
  static constexpr index_t kWidth = Target::kWidth, kPanel = Target::kPanel, kPanels = kPackedKeys / kPanel;
  static constexpr index_t kParts = Target::kParts;

 public:
  // `ask`: whether rows further on are to be asked for while packing, since nobody has before. `pairs`: whether sums
  // for scores in pairs are packed, too.
  PackedKeys(const Problem& p, const RowFormat<Target>& format, index_t block_keys, bool ask = true, bool pairs = false)
      : p_(p),
        format_(format),
        keys_(block_keys),
        ask_(ask),
        pairs_(pairs),
        depth_(round_up(p.D, Target::kDepth)),
        k_stride_(round_up(p.D, kWidth)),
        v_stride_(round_up(p.Dv, kWidth)) {}

  FA_INLINE index_t keys() const { return keys_; }
  FA_INLINE index_t depth() const { return depth_; }
  FA_INLINE index_t block_elems() const {
    return keys_ * kParts * (depth_ + v_stride_) + (pairs_ ? PairSums<Target>::elems(keys_) : 0);
  }
  // Rows on their way from a tensor into a panel: few enough to stay in L1.
  FA_INLINE index_t staging_elems() const { return kPanel * kParts * max_of(k_stride_, v_stride_); }

  // K^T: features by keys; V: keys by features; both, in their depth, part by part. `keys` of the block exist.
  FA_INLINE Panels<Target> k(Elem* block, index_t keys) const {
    return {block, kParts * depth_, round_up(keys, kWidth)};
  }
  FA_INLINE Panels<Target> v(Elem* block, index_t keys) const {
    return {block + keys_ * kParts * depth_, kParts * round_up(keys, kWidth), v_stride_};
  }

  FA_INLINE PairSums<Target> pairs(Elem* block) const {
    return PairSums<Target>::at(block + keys_ * kParts * (depth_ + v_stride_), keys_);
  }

  // Parts of kPackedKeys keys, as a worker packs them, of a sequence that has `keys` keys. More than fit go around: a
  // part is where there was one that nobody needs any more.
  FA_INLINE index_t parts() const { return ceil_div(keys_, kPackedKeys); }
  FA_INLINE index_t place(index_t part) const { return part % parts(); }
  FA_INLINE index_t held(index_t keys) const { return min_of(keys, keys_); }
  Range parts_of(Range seen, index_t keys) const {
    const Panels<Target> panels = k(nullptr, held(keys));
    const auto part = [&](index_t key) { return keys > keys_ ? key / kPackedKeys : panels.at(key) / kPanels; };
    return {part(seen.begin), part(seen.end - 1) + 1};
  }
  // The first of the keys seen that lie at the front, or 0.
  FA_INLINE index_t front(Range seen, index_t keys) const {
    return keys > keys_ ? max_of<index_t>(seen.end - 1, 0) / keys_ * keys_ : 0;
  }
  void pack_part(index_t b, index_t hk, index_t part, index_t keys, Elem* block, Elem* staging) const {
    const index_t at = place(part);
    pack(b, hk, (part - at) * kPackedKeys, held(keys), {at * kPanels, (at + 1) * kPanels}, block, staging);
  }

  // Packs panels [panels.begin, panels.end) of keys, as far as these exist, of the block that begins at key `first` and
  // has room for `keys` keys.
  void pack(index_t b, index_t hk, index_t first, index_t keys, Range panels, Elem* block, Elem* staging) const {
    const Panels<Target> k_panels = k(block, keys), v_panels = v(block, keys);
    const index_t there = min_of(keys, p_.sequence(b).k_len - first);
    for (index_t panel = panels.begin; panel < min_of(panels.end, k_panels.count()); ++panel) {
      const index_t begin = k_panels.begin(panel), width = k_panels.width(panel);
      if (begin >= there) return;
      const index_t rows = min_of(width, there - begin);
      const RowsToPack<Target> of_k =
          rows_of(p_.k, b, hk, first + begin, rows, width, p_.D, kParts * k_stride_, staging);
      pack_transposed_panel(of_k, k_panels.depth / k_panels.kStep, width, k_panels.panel(panel));
      if constexpr (kHasPairs<Target>)
        if (pairs_) pairs(block).sum(k_panels.panel(panel), depth_, width, begin);
      const RowsToPack<Target> of_v =
          rows_of(p_.v, b, hk, first + begin, rows, width, p_.Dv, kParts * v_stride_, staging);
      pack_direct_rows(of_v, begin, begin + width, v_panels);
    }
  }

 private:
  // Keys first .. first + keys - 1, wherever they are stored. Within a page rows further on are asked for, at its end
  // those of the next; where a panel has several pages, that has brought nothing.
  RowsToPack<Target> rows_of(const Operand& x, index_t b, index_t hk, index_t first, index_t keys, index_t padded,
                             index_t features, index_t stride, Elem* staging) const {
    const Sequence sequence = p_.sequence(b);
    const KeyRun run = p_.keys_from(sequence, b, first);
    if (ask_ && p_.storage.pages && run.count == keys)
      ask_for_keys(format_, p_, x, sequence, b, hk, first + keys, features);
    if (run.count >= keys)
      return rows_to_pack(format_, x, row_at(x, format_.size, run.batch, run.row, hk), run.count, keys, padded,
                          features, stride, ask_, staging);
    load_keys(format_, p_, x, b, hk, first, keys, padded, features, stride, staging);
    return {staging, stride};
  }

  const Problem& p_;
  const RowFormat<Target>& format_;
  const index_t keys_;
  const bool ask_, pairs_;
  const index_t depth_, k_stride_, v_stride_;
};

}  // namespace flash_attn::cpu
