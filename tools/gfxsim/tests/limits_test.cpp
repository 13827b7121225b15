// Where a kernel is refused because it asks for what is not simulated, and where registers and accesses end.
#include "checks/bench.h"
#include "harness.h"
#include "setup.h"

namespace gfxsim::testing {
namespace {

TEST(Refused, OutputModifiers) {
  for (const char* modifier : {"mul:2", "mul:4", "div:2"}) {
    const std::string text = std::string("v_mul_f32_e64 v8, v0, v2 ") + modifier;
    const Op op = parse_instruction(find_target("gfx942"), text, 0, 8);
    EXPECT_EQ(op.run, nullptr) << text;
    EXPECT_NE(op.unsupported.find(modifier), std::string::npos) << op.unsupported;
    EXPECT_NE(op.unsupported.find("denormals"), std::string::npos) << op.unsupported;
  }
}

// A launch of a kernel whose descriptor may be changed before.
class Launches : public ::testing::TestWithParam<std::string> {
 protected:
  Launches()
      : program(load_program(find_target(GetParam()), read_code_object("basic", GetParam()))),
        kernel(program.find("vector_add")) {}
  // Why it is refused; "" when it is not.
  std::string refusal() const {
    try {
      prepare_launch(program, kernel, {1}, {64}, 0, std::vector<std::byte>(kernel.info.kernarg_bytes));
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }
  std::uint32_t& modes() { return kernel.descriptor.rsrc1; }
  bool wide() const { return GetParam() == "gfx942"; }

  Program program;
  Kernel kernel;
};
INSTANTIATE_TEST_SUITE_P(Targets, Launches, ::testing::Values("gfx942", "gfx1100", "gfx1201"));

TEST_P(Launches, OfOtherModesAreRefused) {
  const std::uint32_t before = modes();
  EXPECT_EQ(refusal(), "");
  modes() = before & ~(1u << 21);
  EXPECT_EQ(refusal().find("DX10_CLAMP") == std::string::npos, GetParam() == "gfx1201") << refusal();
  modes() = before | 1u << 26;
  EXPECT_NE(refusal().find("FP16_OVFL"), std::string::npos) << refusal();
}

TEST_P(Launches, WithTooFewRegistersAreRefused) {
  EXPECT_GT(kernel.vectors, 0);
  modes() = (modes() & ~63u) | 7;  // 64 registers
  kernel.descriptor.rsrc3 = 15;    // on gfx942 all 64 of them are v
  kernel.vectors = 64;
  EXPECT_EQ(refusal(), "");
  kernel.vectors = 65;
  EXPECT_NE(refusal().find("uses v64"), std::string::npos) << refusal();
  kernel.vectors = 48;
  if (!wide()) return;
  kernel.descriptor.rsrc3 = 11;  // 48 are v, 16 are a
  kernel.accumulators = 16;
  EXPECT_EQ(refusal(), "");
  kernel.accumulators = 17;
  EXPECT_NE(refusal().find("uses a16"), std::string::npos) << refusal();
  kernel.accumulators = 16, kernel.vectors = 49;
  EXPECT_NE(refusal().find("uses v48"), std::string::npos) << refusal();
}

TEST(Registers, AreCounted) {
  const Program program = load_program(find_target("gfx942"), read_code_object("matrix", "gfx942"));
  for (const Kernel& kernel : program.kernels) {
    EXPECT_GT(kernel.vectors, 0) << kernel.info.name;
    EXPECT_LE(kernel.vectors + kernel.accumulators, kernel.info.vgprs) << kernel.info.name;
  }
}

TEST(Atomics, AreAlignedToTheirSize) {
  for (const auto& [instruction, offset, is_right] : {std::tuple("global_atomic_add_x2 v0, v[4:5], s[2:3]", 8u, true),
                                                      std::tuple("global_atomic_add_x2 v0, v[4:5], s[2:3]", 4u, false),
                                                      std::tuple("global_atomic_add v0, v4, s[2:3]", 4u, true),
                                                      std::tuple("global_load_dwordx2 v[8:9], v0, s[2:3]", 4u, true)}) {
    Bench bench("gfx942", 1);
    bench.set_scalar64(2, (bench.buffer_address() + 15) / 16 * 16);
    std::fill_n(bench.wave().v[0], kMaxLanes, offset);
    const std::string found = bench.execute(instruction);
    EXPECT_EQ(found.find("misaligned") == std::string::npos, is_right) << instruction << ": " << found;
  }
}

TEST(Exec, HasOneBitALane) {
  Bench bench("gfx1201", 1);
  Wave& wave = bench.wave();
  wave.s[kExec + 1] = 0;
  ASSERT_EQ(bench.execute("s_mov_b64 exec, -1"), "");
  EXPECT_EQ(wave.exec(), 0xffffffffu);
  // A barrier sees no lanes more than there are.
  EXPECT_EQ(bench.execute("s_barrier_signal -1"), "");
}

}  // namespace
}  // namespace gfxsim::testing
