// How definedness follows data: which halves of a result are defined when halves of its sources are not.
#include "checks/bench.h"
#include "harness.h"

namespace gfxsim::testing {
namespace {

struct Row {
  const char* instruction;
  int undefined_register;       // this vector register
  unsigned undefined_halves;    // bit 0: low, bit 1: high
  unsigned defined;             // halves of v8 that are defined then
  unsigned defined_second = 3;  // of v9
};

const Row kRows[] = {
    {"v_add_f32_e32 v8, v0, v2", 2, 1, 0},
    {"v_add_f32_e32 v8, v0, v2", 4, 3, 3},
    {"v_mov_b32_e32 v8, v0", 0, 2, 1},
    {"v_or_b32_e32 v8, v0, v2", 2, 1, 2},
    {"v_and_b32_e32 v8, 0xffff, v0", 0, 2, 3},
    {"v_and_b32_e32 v8, 0xffff, v0", 0, 1, 2},
    {"v_and_b32_e32 v8, 0xffff0000, v0", 0, 1, 3},
    {"v_and_or_b32 v8, v0, 0xffff, v2", 0, 2, 3},
    {"v_and_or_b32 v8, v0, 0xffff, v2", 2, 2, 1},
    {"v_lshlrev_b32_e32 v8, 16, v0", 0, 2, 3},
    {"v_lshlrev_b32_e32 v8, 16, v0", 0, 1, 1},
    {"v_lshlrev_b32_e32 v8, 4, v0", 0, 2, 1},
    {"v_lshrrev_b32_e32 v8, 16, v0", 0, 1, 3},
    {"v_lshrrev_b32_e32 v8, 16, v0", 0, 2, 2},
    {"v_lshl_or_b32 v8, v0, 16, v2", 0, 2, 3},
    {"v_lshl_or_b32 v8, v0, 16, v2", 2, 1, 2},
    {"v_perm_b32 v8, v0, v2, 0x7060302", 0, 1, 3},
    {"v_perm_b32 v8, v0, v2, 0x7060302", 0, 2, 1},
    {"v_perm_b32 v8, v0, v2, 0x7060302", 2, 2, 2},
    {"v_perm_b32 v8, v0, v2, v4", 0, 1, 0},
    {"v_pack_b32_f16 v8, v0, v2", 0, 2, 3},
    {"v_pack_b32_f16 v8, v0, v2", 2, 1, 1},
    {"v_pk_add_f16 v8, v0, v2", 2, 2, 1},
    {"v_pk_fma_f32 v[8:9], v[0:1], v[2:3], v[4:5]", 5, 3, 3, 0},
    {"v_cvt_f16_f32_e32 v8, v0", 0, 1, 2},
    {"v_mad_u64_u32 v[8:9], vcc, v0, v2, v[4:5]", 5, 3, 3, 0},
    {"v_mad_u64_u32 v[8:9], vcc, v0, v2, v[4:5]", 4, 3, 0, 0},
    {"v_lshl_add_u64 v[8:9], v[0:1], 3, v[2:3]", 1, 3, 3, 0},
    {"v_lshlrev_b64 v[8:9], 2, v[0:1]", 1, 3, 3, 0},
    {"v_lshrrev_b64 v[8:9], 2, v[0:1]", 1, 3, 0, 0},
    {"v_mov_b32_dpp v8, v0 row_mirror row_mask:0xf bank_mask:0xf", 0, 2, 1},
    {"ds_bpermute_b32 v8, v0, v2", 2, 1, 2},
};

TEST(Defined, FollowsHalves) {
  for (const Row& row : kRows) {
    Bench bench("gfx942", 1);
    Wave& wave = bench.wave();
    Halves& source = wave.v_defined[row.undefined_register];
    if (row.undefined_halves & 1) source.lo = 0;
    if (row.undefined_halves & 2) source.hi = 0;
    ASSERT_EQ(bench.execute(row.instruction), "") << row.instruction;
    const auto defined = [&](int reg) {
      const Halves halves = wave.v_defined[reg];
      EXPECT_TRUE(halves.lo == 0 || ~halves.lo == 0) << row.instruction;
      return (halves.lo ? 1u : 0u) | (halves.hi ? 2u : 0u);
    };
    EXPECT_EQ(defined(8), row.defined) << row.instruction << ", v" << row.undefined_register;
    EXPECT_EQ(defined(9), row.defined_second) << row.instruction << ", v" << row.undefined_register;
  }
}

// Loads into one half: what the other half holds is only defined where registers have no error correction.
TEST(Defined, TheOtherHalfOf16BitLoads) {
  for (const char* target : {"gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"})
    for (const char* load : {"global_load_short_d16", "ds_read_u16_d16", "scratch_load_short_d16"})
      for (const bool high : {false, true}) {
        Bench bench(target, 1);
        Wave& wave = bench.wave();
        std::fill_n(wave.v[0], kMaxLanes, 0);
        std::fill_n(bench.group().scratch_defined.begin(), bench.group().scratch_defined.size(), 1);
        bench.set_scalar64(2, bench.buffer_address());
        const std::string name = load, address = name[0] == 'g' ? ", s[2:3]" : name[0] == 's' ? ", off" : "";
        ASSERT_EQ(bench.execute(name + (high ? "_hi" : "") + " v8, v0" + address), "") << target;
        const bool keeps = bench.target().generation > 9;
        const Halves halves = wave.v_defined[8];
        EXPECT_EQ((high ? halves.hi : halves.lo) & wave.all_lanes(), wave.all_lanes()) << target << " " << name;
        EXPECT_EQ((high ? halves.lo : halves.hi) & wave.all_lanes(), keeps ? wave.all_lanes() : 0)
            << target << " " << name;
      }
}

TEST(Defined, SelectionNeedsOnlyTheChosen) {
  Bench bench("gfx942", 1);
  bench.wave().v_defined[0] = {};
  bench.set_scalar64(10, 0xff);
  ASSERT_EQ(bench.execute("v_cndmask_b32_e64 v8, v0, v2, s[10:11]"), "");
  EXPECT_EQ(bench.wave().v_defined[8].both(), 0xffu);
}

TEST(Defined, OneUndefinedRowOfAProduct) {
  Bench bench("gfx942", 1);
  bench.wave().v_defined[0].lo = ~(std::uint64_t(1) << 5);  // A[5][0]
  ASSERT_EQ(bench.execute("v_mfma_f32_32x32x8_f16 v[8:23], v[0:1], v[2:3], 0"), "");
  for (int reg = 0; reg < 16; ++reg) {
    // Row 5 is register 1 of the upper lanes.
    const std::uint64_t wanted = reg == 1 ? 0xffffffffu : ~std::uint64_t(0);
    EXPECT_EQ(bench.wave().v_defined[8 + reg].both(), wanted) << reg;
  }
}

TEST(Defined, AZeroDecidesAScalarAnd) {
  Bench bench("gfx942", 1);
  bench.wave().s_defined[0] = bench.wave().s_defined[1] = 0;
  bench.set_scalar64(2, 0xf0);
  ASSERT_EQ(bench.execute("s_and_b64 s[8:9], s[0:1], s[2:3]"), "");
  EXPECT_EQ(bench.wave().defined64(8), ~std::uint64_t(0xf0));
  EXPECT_NE(bench.execute("s_and_b64 exec, s[0:1], s[2:3]").find("EXEC"), std::string::npos);
}

}  // namespace
}  // namespace gfxsim::testing
