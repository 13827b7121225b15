// The unit check of every opcode.
#include "harness.h"

namespace gfxsim::testing {
namespace {

TEST(OpcodeChecks, AllPass) {
  for (const OpcodeCheck& check : opcode_checks())
    for (const std::uint64_t seed : {1, 2}) {
      const std::string difference = check.run(seed);
      EXPECT_EQ(difference, "") << check.instruction << " on " << check.target;
    }
}

TEST(OpcodeChecks, EveryOpcodeHasOne) {
  for (const char* target : {"gfx942", "gfx1201"})
    for (const std::string& opcode : supported_opcodes(target)) EXPECT_TRUE(is_unit_checked(opcode)) << opcode;
  EXPECT_FALSE(is_unit_checked("v_no_such_instruction"));
}

}  // namespace
}  // namespace gfxsim::testing
