// Packed keys of a sequence that is longer than the room for them: each part is where its turn puts it.
#include "cpu/packed_keys.h"

#include <gtest/gtest.h>

#include <vector>

namespace flash_attn::cpu {
namespace {

using Target = Portable32;

// Keys of the sequence, and those that there is room for.
struct Room {
  index_t length, keys;
};

class PackedKeysTest : public testing::TestWithParam<Room> {
 protected:
  static constexpr index_t kD = 8, kDv = 16, kHk = 2;

  PackedKeysTest() {
    p.B = 1, p.H = p.Hk = kHk, p.D = kD, p.Dv = kDv, p.Sq = 1, p.Sk = p.Tk = length, p.Tq = 1;
    p.k = operand(k, kD), p.v = operand(v, kDv);
  }
  Operand operand(std::vector<float>& x, index_t features) const {
    x.resize(std::size_t(length * kHk * features));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(i + 1);
    return {x.data(), length * kHk * features, kHk * features, features};
  }
  static float at(const Operand& x, index_t key, index_t hk, index_t d) {
    return static_cast<const float*>(x.data)[key * x.row_stride + hk * x.head_stride + d];
  }
  // Of a panel whose k-steps are single numbers.
  static float of(const Panels<Target>& panels, index_t depth, index_t column) {
    const index_t panel = panels.at(column), width = panels.width(panel);
    return panels.panel(panel)[depth * width + column - panels.begin(panel)];
  }

  const index_t length = GetParam().length;
  Problem p;
  std::vector<float> k, v;
};

INSTANTIATE_TEST_SUITE_P(Rooms, PackedKeysTest,
                         testing::Values(Room{1000, 1024}, Room{1000, 384}, Room{1024, 384}, Room{385, 384},
                                         Room{384, 384}, Room{70, 128}));

// As a window does: from the last keys to the first, as many at a time as there is room for.
TEST_P(PackedKeysTest, AreFoundWhereRunsSay) {
  const auto [keys, room] = GetParam();
  const RowFormat<Target> format = row_format<Target>(DType::f32);
  const PackedKeys<Target> packed(p, format, room);
  std::vector<float> block(std::size_t(packed.block_elems()), -1.0f), staging(std::size_t(packed.staging_elems()));
  std::vector<index_t> there(std::size_t(packed.parts()), -1);

  for (index_t last = keys; last > 0; last -= kPackedKeys) {
    const Range seen{max_of<index_t>(0, round_up(last, kPackedKeys) - round_up(room, kPackedKeys)), last};
    const Range parts = packed.parts_of(seen, keys);
    ASSERT_LE(parts.end - parts.begin, packed.parts());
    for (index_t part = parts.begin; part < parts.end; ++part) {
      index_t& held = there[std::size_t(packed.place(part))];
      if (held != part) packed.pack_part(0, 1, part, keys, block.data(), staging.data());
      held = part;
    }
    const Panels<Target> k_panels = packed.k(block.data(), packed.held(keys));
    const Panels<Target> v_panels = packed.v(block.data(), packed.held(keys));
    const index_t front = packed.front(seen, keys);
    // Past the last key, zeros up to a whole vector.
    for (index_t key = seen.begin; key < (last == keys ? round_up(keys, Target::kWidth) : seen.end); ++key) {
      const index_t place = key < front ? key - front + packed.keys() : key - front;
      ASSERT_TRUE(0 <= place && place < packed.keys());
      const auto expected = [&](const Operand& x, index_t d) { return key < keys ? at(x, key, 1, d) : 0.0f; };
      for (index_t d = 0; d < kD; ++d) ASSERT_EQ(of(k_panels, d, place), expected(p.k, d)) << "key " << key;
      for (index_t d = 0; d < kDv; ++d) ASSERT_EQ(of(v_panels, place, d), expected(p.v, d)) << "key " << key;
    }
  }
}

}  // namespace
}  // namespace flash_attn::cpu
