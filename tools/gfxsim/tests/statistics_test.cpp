// LDS clocks by the phase rules, and the counts of a launch.
#include <new>

#include "bank_conflicts.h"
#include "harness.h"

namespace gfxsim::testing {
namespace {

struct LdsCase {
  const char* name;
  std::uint32_t stride, bytes;  // lane i accesses address i * stride
  bool is_read;
  const char* target;
  std::uint32_t clocks, conflicts;
};

// Worked out by hand from the rules: 32 banks of 4 bytes, 128 bytes to a conflict-free phase.
const LdsCase kCases[] = {
    {"consecutive words: 32 lanes a phase", 4, 4, true, "gfx942", 2, 0},
    {"one word for all lanes is a broadcast", 0, 4, true, "gfx942", 2, 0},
    {"stride of two words: two lanes a bank", 8, 4, true, "gfx942", 4, 2},
    {"stride of 32 words: one bank", 128, 4, true, "gfx942", 64, 62},
    {"stride of 33 words: none", 132, 4, true, "gfx942", 2, 0},
    {"consecutive 8 bytes: 16 lanes a phase", 8, 8, true, "gfx942", 4, 0},
    {"consecutive 16 bytes written: 8 consecutive lanes a phase", 16, 16, false, "gfx942", 8, 0},
    {"16 bytes read at a stride of 128: the 8 lanes of a phase meet", 128, 16, true, "gfx942", 64, 56},
    {"wave32: consecutive words", 4, 4, true, "gfx1201", 1, 0},
    {"wave32: consecutive 16 bytes", 16, 16, true, "gfx1201", 4, 0},
};

TEST(BankConflicts, ByHand) {
  for (const LdsCase& c : kCases) {
    std::uint32_t address[64];
    for (std::uint32_t i = 0; i < 64; ++i) address[i] = i * c.stride;
    const int lanes = std::string(c.target) == "gfx942" ? 64 : 32;
    const LdsClocks clocks = lds_clocks(find_target(c.target), address, ~std::uint64_t(0), lanes, c.bytes, c.is_read);
    EXPECT_EQ(clocks.total, c.clocks) << c.name;
    EXPECT_EQ(clocks.conflicts, c.conflicts) << c.name;
  }
}

// The phases of 16-byte reads on gfx942 are not of consecutive lanes: lanes 0 and 20 share one, lanes 0 and 4 do not.
TEST(BankConflicts, PhasesOfWideReads) {
  const auto conflicts = [](int lane, bool is_read) {
    std::uint32_t address[64];
    for (std::uint32_t i = 0; i < 64; ++i) address[i] = i * 16;
    address[lane] = 1024;  // the banks of lane 0, another word
    const std::uint64_t lanes = 1 | std::uint64_t(1) << lane;
    return lds_clocks(find_target("gfx942"), address, lanes, 64, 16, is_read).conflicts;
  };
  EXPECT_EQ(conflicts(20, true), 1u);
  EXPECT_EQ(conflicts(4, true), 0u);
  EXPECT_EQ(conflicts(20, false), 0u);
  EXPECT_EQ(conflicts(4, false), 1u);
}

// Memory that begins on a line.
template <class T>
struct LineAllocator {
  using value_type = T;
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(128))); }
  void deallocate(T* data, std::size_t) { ::operator delete(data, std::align_val_t(128)); }
  bool operator==(const LineAllocator&) const { return true; }
};

TEST(Statistics, OfATranspose) {
  for (const char* target : {"gfx942", "gfx1201"}) {
    Device device(target);
    const auto module = device.load(read_code_object("basic", target));
    std::vector<float, LineAllocator<float>> x(32 * 32), y(32 * 32);
    Arguments arguments(device);
    arguments(x)(y)(32)(32);
    LaunchOptions options;
    options.statistics = true;
    const Statistics s = device.launch(*module, "transpose", {1}, {256}, 0, arguments.bytes(), options).statistics;
    EXPECT_EQ(s.global_bytes, 2u * 32 * 32 * 4);
    EXPECT_EQ(s.global_lines, 2u * 32);  // each row of 128 bytes is touched by one instruction
    EXPECT_EQ(s.by_class.at("barrier"), std::string(target) == "gfx942" ? 4u : 16u);
    EXPECT_EQ(s.matrix_flops, 0u);
    std::uint64_t sum = 0;
    for (const auto& [name, count] : s.by_opcode) sum += count;
    EXPECT_EQ(sum, s.instructions);
  }
}

TEST(Statistics, OfAMatrixProduct) {
  Device device("gfx942");
  const auto module = device.load(read_code_object("matrix", "gfx942"));
  std::vector<std::uint16_t> a(256), b(256);
  std::vector<float> c(1024);
  Arguments arguments(device);
  arguments(a)(b)(c);
  const Statistics s = device.launch(*module, "mfma_32x32x8_f16", {1}, {64}, 0, arguments.bytes()).statistics;
  EXPECT_EQ(s.matrix_flops, 2u * 32 * 32 * 8);
  EXPECT_EQ(s.by_class.at("matrix"), 1u);
  EXPECT_DOUBLE_EQ(s.matrix_share(), 1.0 / double(s.instructions));
}

}  // namespace
}  // namespace gfxsim::testing
