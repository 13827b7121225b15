// K and V of one (sequence, key head) as the B operands of scores and output, block by block of keys.
#pragma once

#include "cpu/pack.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

template <class Target>
class PackedKeys {
  using Elem = typename Target::Elem;
  static constexpr index_t kWidth = Target::kWidth, kPanel = Target::kPanel;

 public:
  PackedKeys(const Problem& p, const RowFormat<Target>& format, index_t block_keys)
      : p_(p),
        format_(format),
        keys_(block_keys),
        depth_(round_up(p.D, Target::kDepth)),
        k_stride_(round_up(p.D, kWidth)),
        v_stride_(round_up(p.Dv, kWidth)) {}

  FA_INLINE index_t depth() const { return depth_; }
  FA_INLINE index_t block_elems() const { return keys_ * (depth_ + v_stride_); }
  // Rows on their way from a tensor into a panel: few enough to stay in L1.
  FA_INLINE index_t staging_elems() const { return kPanel * max_of(k_stride_, v_stride_); }

  // K^T: features by keys; V: keys by features. `keys` of the block exist.
  FA_INLINE Panels<Target> k(Elem* block, index_t keys) const { return {block, depth_, round_up(keys, kWidth)}; }
  FA_INLINE Panels<Target> v(Elem* block, index_t keys) const {
    return {block + keys_ * depth_, round_up(keys, kWidth), v_stride_};
  }

  // Packs panels [panels.begin, panels.end) of keys of the block that begins at key `first` and has `keys` keys.
  void pack(index_t b, index_t hk, index_t first, index_t keys, Range panels, Elem* block, Elem* staging) const {
    const Panels<Target> k_panels = k(block, keys), v_panels = v(block, keys);
    for (index_t panel = panels.begin; panel < min_of(panels.end, k_panels.count()); ++panel) {
      const index_t begin = k_panels.begin(panel), width = k_panels.width(panel);
      const index_t rows = min_of(width, keys - begin);
      load_keys(format_, p_, p_.k, b, hk, first + begin, rows, width, p_.D, k_stride_, staging);
      pack_transposed_panel<Target>(staging, k_stride_, depth_ / k_panels.kStep, width, k_panels.panel(panel));
      load_keys(format_, p_, p_.v, b, hk, first + begin, rows, width, p_.Dv, v_stride_, staging);
      pack_direct_rows<Target>(staging, v_stride_, begin, begin + width, v_panels);
    }
  }

 private:
  const Problem& p_;
  const RowFormat<Target>& format_;
  const index_t keys_, depth_, k_stride_, v_stride_;
};

}  // namespace flash_attn::cpu
