#include "core/features.h"

#include <gtest/gtest.h>

namespace flash_attn {
namespace {

TEST(Features, OfAPlainProblemAreNone) { EXPECT_TRUE(features_of(Problem{}).empty()); }

TEST(Features, AreRefusedByName) {
  Problem p;
  p.window_right = 0;
  p.sink = &p;
  EXPECT_EQ(features_of(p), (std::vector<Feature>{Feature::window, Feature::learnable_sink}));
  EXPECT_NO_THROW(require_features(p, "gpu", {Feature::window, Feature::learnable_sink, Feature::softcap}));
  try {
    require_features(p, "gpu", {Feature::window});
    FAIL();
  } catch (const NotSupported& error) {
    EXPECT_NE(std::string(error.what()).find("the gpu backend does not support learnable_sink"), std::string::npos);
  }
}

}  // namespace
}  // namespace flash_attn
