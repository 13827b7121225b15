// gfxsim executes AMDGPU code objects on the CPU and reports what hardware would hide.
//
//   gfxsim::Device device("gfx942");
//   auto module = device.load(bytes);
//   device.register_buffer(ptr, size, "q");
//   auto result = device.launch(*module, "kernel", {blocks}, {threads}, dynamic_lds, kernargs, options);
//
// Device memory is host memory: kernels read and write the registered buffers in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gfxsim {

/// Wrong use, or something this simulator does not model (an opcode, a modifier, a relocation): never a wrong result
/// instead.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A code object of another target than the device's.
class WrongTarget : public Error {
 public:
  using Error::Error;
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t(x) * y * z; }
};

/// Which wave of a workgroup runs next, and for how long.
enum class Schedule {
  in_order,     ///< each wave runs until it must wait for the others
  round_robin,  ///< one instruction each
  random,       ///< a random wave for 1 to 32 instructions, by LaunchOptions::seed
};

/// Accesses outside registered buffers are always reported (and not performed); these checks can be chosen.
enum Check : unsigned {
  kCheckUndefined = 1,    ///< consequences of registers or LDS never written: addresses, stored data, branches, EXEC
  kCheckRaces = 2,        ///< LDS accesses of two waves, one a write, not ordered by a barrier and the waits before it
  kCheckWaits = 4,        ///< a register used before the wait for the load into it
  kCheckBarriers = 8,     ///< barriers under partial EXEC, or not reached by every wave
  kCheckUnitChecks = 16,  ///< refuse kernels with opcodes that have no unit check of their own
  kCheckNone = 0,
  kCheckAll = 31,
};

/// "in-order", "round-robin" or "random". Throws Error.
Schedule parse_schedule(std::string_view name);
/// "all", "none", or some of "undefined,races,waits,barriers,unit-checks". Throws Error.
unsigned parse_checks(std::string_view names);

struct LaunchOptions {
  Schedule schedule = Schedule::in_order;
  std::uint64_t seed = 0;
  unsigned checks = kCheckAll;                                   ///< Check values, or-ed
  int threads = 1;                                               ///< host threads; 0: one per processor
  std::uint64_t max_wave_instructions = std::uint64_t(1) << 30;  ///< more than this in one wave is a run-away loop
  std::size_t max_reports = 20;                                  ///< distinct findings before the launch stops
  std::uint64_t nop_at = 0;  ///< address of an instruction to leave out: is this barrier or wait needed? 0: none
  bool statistics = false;   ///< also LDS bank conflicts, global cache lines, and counts by address
};

/// One finding. Findings of the same kind at the same instruction are counted, the first is described.
struct Report {
  /// out-of-bounds, misaligned, undefined, operand-copies, lds-race, missing-wait, barrier, deadlock, run-away;
  /// wave-order, which is about the whole launch
  std::string kind;
  std::string kernel, target;
  Dim3 workgroup;
  int wave = 0;
  int lane = -1;            ///< -1: the whole wave
  std::uint64_t pc = 0;     ///< virtual address in the code object, as in its disassembly
  std::string instruction;  ///< disassembled
  std::string message;
  std::uint64_t count = 1;
  std::string to_string() const;
};

enum WaitedFor : unsigned {
  kWaitedForLoads = 1,
  kWaitedForStores = 2,  ///< to memory, and no load
  kWaitedForLds = 4,
  kWaitedForScalarLoads = 8,
};

struct Statistics {
  std::uint64_t instructions = 0;  ///< executed by waves
  std::map<std::string, std::uint64_t> by_class, by_opcode;
  std::map<std::uint64_t, std::uint64_t> by_address;  ///< executed instructions, with LaunchOptions::statistics
  /// What executed waits ended, by address, with LaunchOptions::statistics: WaitedFor values, or-ed. 0: nothing was on
  /// its way.
  std::map<std::uint64_t, unsigned> waited_for;
  std::uint64_t matrix_flops = 0;                         ///< of MFMA and WMMA, all lanes
  std::uint64_t lds_clocks = 0, lds_conflict_clocks = 0;  ///< LDS busy clocks, and those above the conflict-free count
  std::uint64_t global_bytes = 0, global_lines = 0;       ///< bytes asked for; 128-byte lines touched per instruction
  double matrix_share() const;                            ///< MFMA and WMMA per executed instruction, 0 to 1
};

struct LaunchResult {
  std::vector<Report> reports;
  Statistics statistics;
  bool ok() const { return reports.empty(); }
};

struct KernelArgument {
  std::string name, kind;  ///< kind: the metadata's .value_kind, such as global_buffer, by_value, hidden_block_count_x
  std::uint32_t offset = 0, size = 0;
};

struct KernelInfo {
  std::string name;
  int wavefront_size = 64;
  std::uint32_t kernarg_bytes = 0, lds_bytes = 0, scratch_bytes = 0;  ///< scratch: per lane
  int vgprs = 0, agprs = 0, sgprs = 0, vgpr_spills = 0, sgpr_spills = 0;
  std::uint32_t max_workgroup_size = 1024;
  std::vector<KernelArgument> arguments;
};

struct Instruction {
  std::uint64_t pc = 0;
  std::string opcode;  ///< canonical: without encoding suffixes, the name that unit checks use
  std::string text;
  std::string kind;         ///< class: salu, valu, matrix, lds, vmem, wait, barrier, ...
  std::string unsupported;  ///< why it cannot be executed; empty when it can
  bool unit_checked = false;
};

class Module {
 public:
  virtual ~Module() = default;
  virtual const std::vector<KernelInfo>& kernels() const = 0;
  virtual const std::string& target() const = 0;
  /// Instructions of one kernel. Throws Error when there is no such kernel.
  virtual std::vector<Instruction> instructions(std::string_view kernel) const = 0;
};

class Device {
 public:
  /// `target`: gfx906, gfx908, gfx90a, gfx942, gfx950, gfx1030, gfx1100 to gfx1103, gfx1150, gfx1151, gfx1200 or
  /// gfx1201. Throws Error.
  explicit Device(std::string target);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// Loads an ELF code object, version 4 to 6, of this target. Throws Error.
  std::shared_ptr<const Module> load(std::span<const std::byte> code_object) const;

  /// Kernels may access [data, data + bytes). Registered ranges must not overlap.
  void register_buffer(void* data, std::size_t bytes, std::string name = "");
  void register_buffer(const void* data, std::size_t bytes, std::string name = "");  ///< read-only
  void unregister_buffer(const void* data);

  /// Runs `grid` workgroups of `block` work-items. `kernargs` holds the explicit arguments, laid out as in the
  /// metadata; hidden arguments are filled in. Throws Error on wrong use; findings are in the result.
  LaunchResult launch(const Module& module, std::string_view kernel, Dim3 grid, Dim3 block, std::uint32_t dynamic_lds,
                      std::span<const std::byte> kernargs, const LaunchOptions& options = {}) const;

  /// As launch, `orders` times from the same contents of the buffers: in order, round robin, then in random orders of
  /// seeds from options.seed on. Buffers whose contents depend on the order are reported as `wave-order`. Findings are
  /// those of all runs, statistics and contents those of the last.
  LaunchResult launch_in_orders(int orders, const Module& module, std::string_view kernel, Dim3 grid, Dim3 block,
                                std::uint32_t dynamic_lds, std::span<const std::byte> kernargs,
                                const LaunchOptions& options = {}) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// One unit check of one opcode: executes it on special and random values and compares with a model of its own.
struct OpcodeCheck {
  std::string opcode, target;
  std::string instruction;                        ///< what is executed, in the disassembler's syntax
  std::function<std::string(std::uint64_t)> run;  ///< takes a seed; returns "" when it passes, else what differs
};
const std::vector<OpcodeCheck>& opcode_checks();

/// Whether an opcode (any of its names) has a unit check.
bool is_unit_checked(std::string_view opcode);

/// Opcodes this simulator executes on `target`, sorted.
std::vector<std::string> supported_opcodes(std::string_view target);

}  // namespace gfxsim
