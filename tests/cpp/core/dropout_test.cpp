#include "core/dropout.h"

#include <gtest/gtest.h>

namespace flash_attn {
namespace {

// Known answers of Philox4x32-10 from the authors' Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  const struct {
    PhiloxWords counter;
    PhiloxKey key;
    PhiloxWords expected;
  } answers[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}}},
      {{{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}},
       {0xa4093822u, 0x299f31d0u},
       {{0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u}}},
  };
  for (const auto& a : answers) {
    const PhiloxWords got = philox4x32(a.counter, a.key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.w[i], a.expected.w[i]);
  }
}

TEST(DropoutRule, ThresholdAndScale) {
  EXPECT_FALSE(make_dropout(0.0, 1, 2).active);
  const DropoutRule half = make_dropout(0.5, 1, 2);
  EXPECT_EQ(half.keep_threshold, 127u);
  EXPECT_DOUBLE_EQ(half.keep_scale, 2.0);
  EXPECT_TRUE(half.keep(127));
  EXPECT_FALSE(half.keep(128));
  EXPECT_EQ(make_dropout(0.17, 1, 2).keep_threshold, 211u);  // floor(255 * 0.83)
}

TEST(DropoutRule, SeedAndOffsetBothMatter) {
  const DropoutRule a = make_dropout(0.5, 1, 2), b = make_dropout(0.5, 2, 1),
                    c = make_dropout(0.5, 1, std::int64_t(2) << 32);
  EXPECT_NE(a.subkey.lo, b.subkey.lo);
  EXPECT_NE(a.subkey.lo, c.subkey.lo);
}

}  // namespace
}  // namespace flash_attn
