// Every kind of finding, each with a planted bug.
#include <numeric>

#include "harness.h"

namespace gfxsim::testing {
namespace {

class Faults : public OnTarget {
 protected:
  LaunchResult run(const char* kernel, const Arguments& arguments, std::uint32_t threads, LaunchOptions options = {},
                   std::uint32_t lds = 0) {
    options.max_wave_instructions = 100000;
    options.checks &= ~unsigned(kCheckUnitChecks);
    return device.launch(*load("faults"), kernel, {1}, {threads}, lds, arguments.bytes(), options);
  }
  // A finding of this kind at an instruction of this name, among those there are.
  static void expect_report(const LaunchResult& result, const std::string& kind, const std::string& kernel,
                            const std::string& mnemonic) {
    std::string all;
    for (const Report& report : result.reports) {
      EXPECT_EQ(report.kernel, kernel);
      EXPECT_NE(report.pc, 0u);
      if (report.kind == kind && report.instruction.rfind(mnemonic, 0) == 0) return;
      all += report.to_string() + "\n";
    }
    ADD_FAILURE() << kernel << ": no " << kind << " at " << mnemonic << " among:\n" << all;
  }
  bool gfx9() const { return GetParam() == "gfx942"; }
};
using FaultsOfSplitBarriers = Faults;
INSTANTIATE_TEST_SUITE_P(Targets, FaultsOfSplitBarriers, ::testing::Values("gfx1201"));
INSTANTIATE_TEST_SUITE_P(Targets, Faults, ::testing::Values("gfx942", "gfx1100", "gfx1201"));

using FaultsOfRepeatedOperands = Faults;
INSTANTIATE_TEST_SUITE_P(Targets, FaultsOfRepeatedOperands, ::testing::Values("gfx1100"));

TEST_P(FaultsOfRepeatedOperands, AreNoticed) {
  std::vector<float> out(256);
  Arguments arguments(device);
  arguments(out);
  expect_report(run("matrix_operand_is_not_repeated", arguments, 32), "operand-copies",
                "matrix_operand_is_not_repeated", "v_wmma");
}

TEST_P(Faults, ReadsPastTheEnd) {
  std::vector<float> x(100), out(101);
  Arguments arguments(device);
  arguments(x, "x")(out, "out")(100);
  const LaunchResult result = run("reads_past_end", arguments, 256);
  expect_report(result, "out-of-bounds", "reads_past_end", "global_load");
  EXPECT_EQ(result.reports[0].lane, 100 % (gfx9() ? 64 : 32));
  EXPECT_EQ(result.reports[0].wave, 100 / (gfx9() ? 64 : 32));
  EXPECT_NE(result.reports[0].message.find("buffer 'x'"), std::string::npos) << result.reports[0].message;
}

TEST_P(Faults, LdsRaces) {
  std::vector<float> x(512), out(256);
  Arguments arguments(device);
  arguments(x)(out);
  for (const LaunchOptions& options : all_schedules()) {
    expect_report(run("misses_barrier", arguments, 256, options), "lds-race", "misses_barrier", "ds_");
    expect_report(run("misses_second_barrier", arguments, 256, options), "lds-race", "misses_second_barrier", "ds_");
    expect_report(run("misses_lds_wait", arguments, 256, options), "lds-race", "misses_lds_wait", "ds_");
  }
}

TEST_P(Faults, LdsRacesOfOneAtomicOfMany) {
  std::vector<int> out(256);
  Arguments arguments(device);
  arguments(out);
  for (const LaunchOptions& options : all_schedules())
    expect_report(run("misses_wait_of_one_atomic", arguments, 256, options), "lds-race", "misses_wait_of_one_atomic",
                  "ds_");
}

TEST_P(Faults, ReadsUnwrittenLds) {
  std::vector<float> out(256);
  Arguments arguments(device);
  arguments(out);
  const LaunchResult result = run("reads_unwritten_lds", arguments, 256);
  expect_report(result, "undefined", "reads_unwritten_lds", "global_store");
  EXPECT_EQ(result.reports[0].lane, 200 % (gfx9() ? 64 : 32));
}

TEST_P(Faults, WritesPastLds) {
  std::vector<float> out(256);
  Arguments arguments(device);
  arguments(out)(1);
  expect_report(run("writes_past_lds", arguments, 256, {}, 1024), "out-of-bounds", "writes_past_lds", "ds_");
}

TEST_P(Faults, UsesLoadTooEarly) {
  std::vector<float> x(64), out(64);
  Arguments arguments(device);
  arguments(x)(out);
  expect_report(run("uses_load_too_early", arguments, 64), "missing-wait", "uses_load_too_early", "v_add_f32");
}

TEST_P(Faults, UnwrittenRegisters) {
  std::vector<float> out(64);
  Arguments arguments(device);
  arguments(out);
  expect_report(run("stores_unwritten_register", arguments, 64), "undefined", "stores_unwritten_register",
                "global_store");
  expect_report(run("branches_on_unwritten_register", arguments, 64), "undefined", "branches_on_unwritten_register",
                gfx9() ? "s_and_saveexec" : "v_cmpx");
}

TEST_P(Faults, Barriers) {
  std::vector<int> x(256), out(256);
  std::iota(x.begin(), x.end(), -100);
  {
    Arguments arguments(device);
    arguments(x)(out);
    expect_report(run("diverges_at_barrier", arguments, 256), "barrier", "diverges_at_barrier", "s_barrier");
  }
  Arguments arguments(device);
  arguments(out);
  for (const LaunchOptions& options : all_schedules())
    expect_report(run("leaves_before_barrier", arguments, 256, options), "barrier", "leaves_before_barrier",
                  "s_barrier");
}

TEST_P(FaultsOfSplitBarriers, Deadlock) {
  std::vector<int> out(256);
  Arguments arguments(device);
  arguments(out);
  for (const LaunchOptions& options : all_schedules())
    expect_report(run("waits_without_signal", arguments, 256, options), "deadlock", "waits_without_signal",
                  "s_barrier_wait");
}

TEST_P(Faults, ResultsThatDependOnWaveOrder) {
  for (const char* kernel : {"depends_on_wave_order", "depends_on_atomic_order"}) {
    std::vector<unsigned> out(16);
    Arguments arguments(device);
    arguments(out, "out");
    const LaunchResult result =
        device.launch_in_orders(8, *load("faults"), kernel, {1}, {256}, 0, arguments.bytes(), {});
    ASSERT_EQ(result.reports.size(), 1u) << kernel;
    EXPECT_EQ(result.reports[0].kind, "wave-order");
    EXPECT_NE(result.reports[0].message.find("'out'"), std::string::npos) << result.reports[0].to_string();
  }
}

TEST_P(Faults, OrdersThatDoNotMatter) {
  std::vector<float> x(512, 1.0f), out(2);
  Arguments arguments(device);
  arguments(x)(out);
  const auto module = load("basic");
  expect_no_reports(device.launch_in_orders(5, *module, "lds_sum", {2}, {256}, 0, arguments.bytes()));
  EXPECT_EQ(out, std::vector<float>(2, 256.0f));
  EXPECT_THROW(device.launch_in_orders(1, *module, "lds_sum", {2}, {256}, 0, arguments.bytes()), Error);
}

TEST_P(Faults, NeverEnds) {
  std::vector<int> out(1);
  Arguments arguments(device);
  arguments(out);
  const LaunchResult result = run("never_ends", arguments, 1);
  ASSERT_FALSE(result.reports.empty());
  EXPECT_EQ(result.reports[0].kind, "run-away");
}

TEST_P(Faults, UnknownInstructionIsRefused) {
  std::vector<unsigned> out(64);
  Arguments arguments(device);
  arguments(out);
  try {
    run("unknown_instruction", arguments, 64);
    FAIL() << "an unknown instruction was accepted";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(gfx9() ? "v_cubeid_f32" : "v_sad_u8"), std::string::npos) << what;
    EXPECT_NE(what.find(GetParam()), std::string::npos) << what;
  }
}

TEST_P(Faults, WrongUseIsRefused) {
  const auto module = load("basic");
  std::vector<float> a(4);
  Arguments arguments(device);
  arguments(a);
  EXPECT_THROW(device.launch(*module, "no_such_kernel", {1}, {64}, 0, arguments.bytes()), Error);
  EXPECT_THROW(device.launch(*module, "vector_add", {1}, {64}, 0, arguments.bytes()), Error);
  EXPECT_THROW(device.launch(*module, "lds_sum", {1}, {512}, 0, arguments.bytes()), Error);
  EXPECT_THROW(Device("gfx803"), Error);
  EXPECT_THROW(device.load(read_code_object("basic", gfx9() ? "gfx1201" : "gfx942")), Error);
  EXPECT_THROW(device.load(std::vector<std::byte>(100)), Error);
  EXPECT_THROW(device.register_buffer(a.data() + 1, 4), Error);
}

}  // namespace
}  // namespace gfxsim::testing
