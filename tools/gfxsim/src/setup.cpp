#include "setup.h"

#include <algorithm>
#include <cstring>

namespace gfxsim {
namespace {

constexpr std::uint32_t kMaxThreads = 1024;

// Bits of the kernel descriptor.
constexpr unsigned kPrivateBuffer = 1, kDispatchPointer = 2, kQueuePointer = 4, kKernargPointer = 8, kDispatchId = 16,
                   kFlatScratchInit = 32, kPrivateSize = 64;
unsigned bits(std::uint32_t word, int low, int count) { return word >> low & ((1u << count) - 1); }

template <class T>
void put(std::vector<std::byte>& out, std::size_t at, T value) {
  if (at + sizeof value <= out.size()) std::memcpy(out.data() + at, &value, sizeof value);
}

void check_modes(const Program& program, const Kernel& kernel) {
  const std::uint32_t rsrc1 = kernel.descriptor.rsrc1;
  if (bits(rsrc1, 12, 4) != 0)
    throw Error("kernel " + kernel.info.name +
                " asks for a rounding mode other than to nearest even, which is not simulated");
  if (bits(rsrc1, 16, 4) != 15)
    throw Error("kernel " + kernel.info.name +
                " flushes denormals, which is not simulated: compile without -fgpu-flush-denormals-to-zero");
  // gfx12 always clamps so, and uses the bit for something else.
  if (program.target->generation < 12 && !bits(rsrc1, 21, 1))
    throw Error("kernel " + kernel.info.name +
                " clears DX10_CLAMP, so that clamping keeps NaN, which is not simulated");
  if (bits(rsrc1, 26, 1))
    throw Error("kernel " + kernel.info.name +
                " sets FP16_OVFL, so that 16-bit results do not overflow to infinity, which is not simulated");
  if (kernel.descriptor.properties & kQueuePointer)
    throw Error("kernel " + kernel.info.name + " needs a queue pointer, which is not simulated");
}

// Against what the descriptor allocates, in the granules that LLVM's "User Guide for AMDGPU Backend" lists under
// GRANULATED_WORKITEM_VGPR_COUNT and ACCUM_OFFSET.
void check_registers(const Program& program, const Kernel& kernel) {
  const Target& target = *program.target;
  const bool large = target.generation == 9 ? target.unified_registers : kernel.info.wavefront_size == 32;
  const int all = (int(bits(kernel.descriptor.rsrc1, 0, 6)) + 1) * (large ? 8 : 4);
  const int first = target.unified_registers ? (int(bits(kernel.descriptor.rsrc3, 0, 6)) + 1) * 4 : all;
  const auto check = [&](const char* file, int used, int allocated) {
    if (used > allocated)
      throw Error("kernel " + kernel.info.name + " uses " + file + std::to_string(used - 1) +
                  ", and its descriptor allocates " + std::to_string(allocated) + " of these registers");
  };
  check("v", kernel.vectors, std::min(all, first));
  check("a", kernel.accumulators, target.unified_registers ? all - first : all);
}

std::uint32_t hidden_value(const Launch& launch, const KernelArgument& argument, bool& known) {
  const std::uint32_t grid[] = {launch.grid.x, launch.grid.y, launch.grid.z};
  const std::uint32_t block[] = {launch.block.x, launch.block.y, launch.block.z};
  const int axis = argument.kind.back() - 'x';
  const std::string prefix = argument.kind.substr(0, argument.kind.size() - 2);
  known = true;
  if (prefix == "hidden_block_count") return grid[axis];
  if (prefix == "hidden_group_size") return block[axis];
  if (prefix == "hidden_remainder" || prefix == "hidden_global_offset") return 0;
  if (argument.kind == "hidden_grid_dims")
    return launch.grid.z * launch.block.z > 1 ? 3 : launch.grid.y * launch.block.y > 1 ? 2 : 1;
  if (argument.kind == "hidden_dynamic_lds_size") return launch.dynamic_lds;
  known = false;
  return 0;
}

void fill_kernarg(Launch& launch, std::span<const std::byte> explicit_arguments) {
  const KernelInfo& info = launch.kernel.info;
  std::size_t needed = 0;
  for (const KernelArgument& argument : info.arguments)
    if (argument.kind.compare(0, 7, "hidden_") != 0)
      needed = std::max<std::size_t>(needed, argument.offset + argument.size);
  if (explicit_arguments.size() < needed)
    throw Error("kernel " + info.name + " takes " + std::to_string(needed) + " bytes of arguments, " +
                std::to_string(explicit_arguments.size()) + " were given");
  // Dispatch code reads the hidden arguments of code object V5 at fixed places even where the metadata stops short.
  launch.kernarg.assign(std::max<std::size_t>(info.kernarg_bytes, needed) + 16, std::byte(0));
  std::copy_n(explicit_arguments.begin(), needed, launch.kernarg.begin());
  for (const KernelArgument& argument : info.arguments) {
    if (argument.kind.compare(0, 7, "hidden_") != 0) continue;
    bool known = false;
    const std::uint32_t value = hidden_value(launch, argument, known);
    if (argument.size == 2) put(launch.kernarg, argument.offset, std::uint16_t(value));
    if (argument.size == 4) put(launch.kernarg, argument.offset, value);
  }
}

void fill_packet(Launch& launch) {
  launch.packet.assign(64, std::byte(0));
  put(launch.packet, 4, std::uint16_t(launch.block.x));
  put(launch.packet, 6, std::uint16_t(launch.block.y));
  put(launch.packet, 8, std::uint16_t(launch.block.z));
  put(launch.packet, 12, launch.grid.x * launch.block.x);
  put(launch.packet, 16, launch.grid.y * launch.block.y);
  put(launch.packet, 20, launch.grid.z * launch.block.z);
  put(launch.packet, 24, launch.kernel.descriptor.scratch_bytes);
  put(launch.packet, 28, launch.kernel.descriptor.lds_bytes + launch.dynamic_lds);
  put(launch.packet, 40, reinterpret_cast<std::uint64_t>(launch.kernarg.data()));
}

class ScalarSetup {
 public:
  explicit ScalarSetup(Wave& wave) : wave_(wave) {}
  void add(std::uint32_t value) { set(next_++, value); }
  void add64(std::uint64_t value) {
    add(std::uint32_t(value));
    add(std::uint32_t(value >> 32));
  }
  void set(int reg, std::uint32_t value) {
    wave_.s[reg] = value;
    wave_.s_defined[reg] = ~0u;
  }
  int count() const { return next_; }

 private:
  Wave& wave_;
  int next_ = 0;
};

void set_scalars(const Launch& launch, const Workgroup& group, Wave& wave) {
  const KernelDescriptor& d = launch.kernel.descriptor;
  ScalarSetup setup(wave);
  const auto address = [](const std::vector<std::byte>& data) { return reinterpret_cast<std::uint64_t>(data.data()); };
  if (d.properties & kPrivateBuffer) {
    setup.add64(kPrivateAperture);
    setup.add64(~std::uint64_t(0));
  }
  if (d.properties & kDispatchPointer) setup.add64(address(launch.packet));
  if (d.properties & kKernargPointer) setup.add64(address(launch.kernarg));
  if (d.properties & kDispatchId) setup.add64(1);
  if (d.properties & kFlatScratchInit) setup.add64(0);
  if (d.properties & kPrivateSize) setup.add(d.scratch_bytes);
  const unsigned preloaded = bits(d.preload, 0, 7), first = bits(d.preload, 7, 9);
  for (unsigned i = 0; i < preloaded; ++i) {
    std::uint32_t word = 0;
    if ((first + i + 1) * 4 <= launch.kernarg.size()) std::memcpy(&word, launch.kernarg.data() + (first + i) * 4, 4);
    setup.add(word);
  }
  while (setup.count() < int(bits(d.rsrc2, 1, 5))) setup.add(0);
  if (launch.program.target->groups_in_ttmp) {
    setup.set(kTtmp0 + 9, group.id.x);
    setup.set(kTtmp0 + 7, group.id.y | group.id.z << 16);
    setup.set(kTtmp0 + 8, std::uint32_t(wave.id) << 25);
  } else {
    if (bits(d.rsrc2, 7, 1)) setup.add(group.id.x);
    if (bits(d.rsrc2, 8, 1)) setup.add(group.id.y);
    if (bits(d.rsrc2, 9, 1)) setup.add(group.id.z);
    if (bits(d.rsrc2, 10, 1)) setup.add(0);
    // Where the wave's scratch begins in the private segment buffer.
    if (bits(d.rsrc2, 0, 1) && (d.properties & kPrivateBuffer)) setup.add(0);
  }
  setup.set(kExec, std::uint32_t(wave.launched));
  setup.set(kExec + 1, std::uint32_t(wave.launched >> 32));
  setup.set(kNull, 0);
}

// Work-item ids of the wave's lanes: x, y and z in 10 bits each of one register, or in a register each, as far as the
// kernel asks for them.
void set_vectors(const Launch& launch, Wave& wave) {
  const std::uint64_t threads = launch.block.count();
  const bool packs = launch.program.target->packs_items;
  const int registers = packs ? 1 : 1 + int(bits(launch.kernel.descriptor.rsrc2, 11, 2));
  wave.launched = 0;
  for (int lane = 0; lane < wave.lanes; ++lane) {
    const std::uint64_t item = std::uint64_t(wave.id) * std::uint64_t(wave.lanes) + std::uint64_t(lane);
    if (item >= threads) break;
    wave.launched |= std::uint64_t(1) << lane;
    const std::uint64_t x = item % launch.block.x, y = item / launch.block.x % launch.block.y,
                        z = item / (std::uint64_t(launch.block.x) * launch.block.y);
    wave.v[0][lane] = std::uint32_t(packs ? x | y << 10 | z << 20 : x);
    if (registers > 1) wave.v[1][lane] = std::uint32_t(y);
    if (registers > 2) wave.v[2][lane] = std::uint32_t(z);
  }
  for (int i = 0; i < registers; ++i) wave.v_defined[i] = {wave.all_lanes(), wave.all_lanes()};
}

}  // namespace

Launch prepare_launch(const Program& program, const Kernel& kernel, Dim3 grid, Dim3 block, std::uint32_t dynamic_lds,
                      std::span<const std::byte> kernargs) {
  const std::uint64_t threads = block.count();
  const std::string name = "kernel " + kernel.info.name + ": ";
  if (grid.count() == 0) throw Error(name + "the grid is empty");
  if (threads == 0 || threads > std::min(kMaxThreads, kernel.info.max_workgroup_size))
    throw Error(name + std::to_string(threads) + " work-items in a workgroup; it was compiled for 1 to " +
                std::to_string(kernel.info.max_workgroup_size));
  const std::uint32_t max_lds = program.target->lds_bytes;
  if (kernel.info.lds_bytes + std::uint64_t(dynamic_lds) > max_lds)
    throw Error(name + std::to_string(kernel.info.lds_bytes + std::uint64_t(dynamic_lds)) + " bytes of LDS; " +
                program.target->name + " has " + std::to_string(max_lds));
  check_modes(program, kernel);
  check_registers(program, kernel);
  Launch launch{program, kernel, grid, block, dynamic_lds, {}, {}};
  fill_kernarg(launch, kernargs);
  fill_packet(launch);
  return launch;
}

void prepare_workgroup(const Launch& launch, std::uint64_t index, Workgroup& group) {
  const int lanes = launch.kernel.info.wavefront_size;
  const std::size_t waves = std::size_t((launch.block.count() + std::uint64_t(lanes) - 1) / std::uint64_t(lanes));
  group.id = {std::uint32_t(index % launch.grid.x), std::uint32_t(index / launch.grid.x % launch.grid.y),
              std::uint32_t(index / (std::uint64_t(launch.grid.x) * launch.grid.y))};
  group.random.seed(group.options.seed ^ (index * 0x9e3779b97f4a7c15u));
  group.lds.reset(launch.kernel.info.lds_bytes + launch.dynamic_lds, int(waves));
  group.scratch_bytes = launch.kernel.descriptor.scratch_bytes;
  const std::size_t scratch_of_wave = std::size_t(group.scratch_bytes) * std::size_t(lanes);
  group.scratch.assign(scratch_of_wave * waves, 0xcb);
  group.scratch_defined.assign(scratch_of_wave * waves, 0);
  group.waves.resize(waves);
  const std::int32_t entry = launch.program.index_of_pc(launch.kernel.descriptor.entry);
  if (entry < 0) throw Error("kernel " + launch.kernel.info.name + " has no code at its entry");
  for (std::size_t i = 0; i < waves; ++i) {
    if (!group.waves[i]) group.waves[i] = std::make_unique<Wave>();
    Wave& wave = *group.waves[i];
    // Registers hold signalling NaN until written, so that a result which depends on them shows it.
    wave = Wave();
    std::fill_n(&wave.v[0][0], std::size_t(kVectorCount) * kMaxLanes, 0x7fa00bad);
    std::fill_n(wave.s, std::size_t(kScalarCount), 0x7fa00bad);
    wave.ieee = bits(launch.kernel.descriptor.rsrc1, 23, 1);
    wave.lanes = lanes;
    wave.id = int(i);
    wave.group = &group;
    wave.target = launch.program.target;
    wave.scratch = group.scratch.data() + scratch_of_wave * i;
    wave.scratch_defined = group.scratch_defined.data() + scratch_of_wave * i;
    wave.next = std::uint32_t(entry);
    set_vectors(launch, wave);
    set_scalars(launch, group, wave);
  }
}

}  // namespace gfxsim
