#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "gfxsim/gfxsim.h"
#include "memory.h"
#include "opcode_table.h"
#include "parse.h"
#include "program.h"
#include "setup.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

bool has_unit_check(const Op& op) {
  if (!op.parts.empty()) return std::all_of(op.parts.begin(), op.parts.end(), has_unit_check);
  return op.opcode && is_unit_checked(op.opcode->name);
}

class LoadedModule : public Module {
 public:
  explicit LoadedModule(Program program) : program_(std::move(program)) {
    for (const Kernel& kernel : program_.kernels) infos_.push_back(kernel.info);
    trust_ = std::make_unique<Trust[]>(infos_.size());
  }
  const std::vector<KernelInfo>& kernels() const override { return infos_; }
  const std::string& target() const override { return program_.target->name; }
  std::vector<Instruction> instructions(std::string_view name) const override {
    const Kernel& kernel = program_.find(name);
    std::vector<Instruction> out;
    for (const Op& op : program_.ops) {
      if (op.pc < kernel.descriptor.entry || op.pc >= kernel.end) continue;
      const std::string opcode = op.opcode ? op.opcode->name : canonical_name(op.text.substr(0, op.text.find(' ')));
      out.push_back(
          {op.pc, opcode, op.text, op.opcode ? class_name(op.opcode->kind) : "", op.unsupported, has_unit_check(op)});
    }
    return out;
  }
  const Program& program() const { return program_; }

  // Refuses a kernel before it runs, if any of its instructions could not be trusted.
  void check_instructions(const Kernel& kernel, unsigned checks) const {
    Trust& trust = trust_[std::size_t(&kernel - program_.kernels.data())];
    std::call_once(trust.once, [&] { look_at(kernel, trust); });
    if (!trust.unsupported.empty()) throw Error(trust.unsupported);
    if ((checks & kCheckUnitChecks) && !trust.unchecked.empty()) throw Error(trust.unchecked);
  }

 private:
  // The first instruction of a kernel that stands against running it, in words; found at the first launch.
  struct Trust {
    std::once_flag once;
    std::string unsupported, unchecked;
  };
  void look_at(const Kernel& kernel, Trust& trust) const {
    for (const Instruction& instruction : instructions(kernel.info.name)) {
      const std::string where = "kernel " + kernel.info.name + ", target " + target() + ": '" + instruction.text +
                                "' at " + std::to_string(instruction.pc);
      if (!instruction.unsupported.empty() && trust.unsupported.empty())
        trust.unsupported = where + " is not simulated: " + instruction.unsupported;
      if (!instruction.unit_checked && trust.unchecked.empty())
        trust.unchecked =
            where + ": opcode " + instruction.opcode + " has no unit check; add one, or leave out kCheckUnitChecks";
    }
  }

  Program program_;
  std::vector<KernelInfo> infos_;
  std::unique_ptr<Trust[]> trust_;
};

void merge_reports(std::vector<Report>& into, const std::vector<Report>& from, std::size_t limit) {
  for (const Report& report : from) {
    const auto same = std::find_if(into.begin(), into.end(),
                                   [&](const Report& r) { return r.kind == report.kind && r.pc == report.pc; });
    if (same != into.end()) {
      same->count += report.count;
    } else if (into.size() < limit) {
      into.push_back(report);
    }
  }
}

void merge_counts(Statistics& into, const Program& program, const Counts& counts, bool by_address) {
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    const std::uint64_t executed = counts.executed[i];
    if (!executed) continue;
    const Op& op = program.ops[i];
    into.instructions += executed;
    into.by_class[class_name(op.opcode->kind)] += executed;
    into.by_opcode[op.opcode->name] += executed;
    if (by_address) into.by_address[op.pc] += executed;
    if (by_address && op.opcode->kind == Class::wait) into.waited_for[op.pc] |= counts.waited_for[i];
    into.matrix_flops += executed * op.opcode->flops;
    into.lds_clocks += counts.lds_clocks[i];
    into.lds_conflict_clocks += counts.lds_conflicts[i];
    into.global_bytes += counts.global_bytes[i];
    into.global_lines += counts.global_lines[i];
  }
}

// Workgroups of one launch, taken one after the other by host threads.
class Execution {
 public:
  Execution(const Launch& launch, const Memory& memory, const LaunchOptions& options)
      : launch_(launch), memory_(memory), options_(options) {}

  LaunchResult run() {
    int threads = options_.threads > 0 ? options_.threads : int(std::max(1u, std::thread::hardware_concurrency()));
    threads = int(std::min<std::uint64_t>(std::uint64_t(threads), launch_.grid.count()));
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([this] { work(); });
    work();
    for (std::thread& thread : others) thread.join();
    if (failure_) std::rethrow_exception(failure_);
    return std::move(result_);
  }

 private:
  void work() {
    try {
      Workgroup group(launch_.program, memory_, options_, launch_.kernel.info.name);
      for (std::uint64_t index; !stop_ && (index = next_++) < launch_.grid.count();) {
        prepare_workgroup(launch_, index, group);
        group.run();
        if (!group.reports.empty()) keep(group);
      }
      const std::lock_guard lock(mutex_);
      merge_counts(result_.statistics, launch_.program, group.counts, options_.statistics);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      stop_ = true;
    }
  }
  void keep(Workgroup& group) {
    const std::lock_guard lock(mutex_);
    merge_reports(result_.reports, group.reports, options_.max_reports);
    group.reports.clear();
    if (result_.reports.size() >= options_.max_reports) stop_ = true;
  }

  const Launch& launch_;
  const Memory& memory_;
  const LaunchOptions& options_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  LaunchResult result_;
  std::exception_ptr failure_;
};

// What the writable buffers hold at one moment.
class Contents {
 public:
  explicit Contents(const Memory& memory) {
    for (const Buffer& buffer : memory.buffers()) {
      if (!buffer.writable) continue;
      const auto* data = reinterpret_cast<const std::byte*>(buffer.begin);
      saved_.push_back({buffer, {data, data + (buffer.end - buffer.begin)}});
    }
  }
  void restore() const {
    for (const auto& [buffer, bytes] : saved_)
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(buffer.begin));
  }
  // The first byte that is different by now, in words; "" when none is.
  std::string difference() const {
    for (const auto& [buffer, bytes] : saved_) {
      const auto* now = reinterpret_cast<const std::byte*>(buffer.begin);
      const auto at = std::mismatch(bytes.begin(), bytes.end(), now).first - bytes.begin();
      if (std::size_t(at) < bytes.size())
        return "byte " + std::to_string(at) + " of buffer '" + buffer.name + "' differs between runs";
    }
    return "";
  }

 private:
  struct Saved {
    Buffer buffer;
    std::vector<std::byte> bytes;
  };
  std::vector<Saved> saved_;
};

}  // namespace

struct Device::State {
  const Target* target = nullptr;
  Memory memory;
};

Device::Device(std::string target) : state_(std::make_unique<State>()) { state_->target = &find_target(target); }
Device::~Device() = default;

std::shared_ptr<const Module> Device::load(std::span<const std::byte> code_object) const {
  return std::make_shared<LoadedModule>(load_program(*state_->target, code_object));
}

void Device::register_buffer(void* data, std::size_t bytes, std::string name) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  state_->memory.add({begin, begin + bytes, true, std::move(name)});
}
void Device::register_buffer(const void* data, std::size_t bytes, std::string name) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  state_->memory.add({begin, begin + bytes, false, std::move(name)});
}
void Device::unregister_buffer(const void* data) { state_->memory.remove(reinterpret_cast<std::uint64_t>(data)); }

LaunchResult Device::launch(const Module& module, std::string_view kernel, Dim3 grid, Dim3 block,
                            std::uint32_t dynamic_lds, std::span<const std::byte> kernargs,
                            const LaunchOptions& options) const {
  const auto& loaded = dynamic_cast<const LoadedModule&>(module);
  const Program& program = loaded.program();
  loaded.check_instructions(program.find(kernel), options.checks);
  const Launch launch = prepare_launch(program, program.find(kernel), grid, block, dynamic_lds, kernargs);
  Memory memory = state_->memory;
  const auto add = [&](const std::byte* data, std::size_t bytes, const char* name) {
    const auto begin = reinterpret_cast<std::uint64_t>(data);
    memory.add({begin, begin + bytes, false, name});
  };
  add(program.image, program.image_bytes, "code object");
  add(launch.kernarg.data(), launch.kernarg.size(), "kernel arguments");
  add(launch.packet.data(), launch.packet.size(), "dispatch packet");
  return Execution(launch, memory, options).run();
}

LaunchResult Device::launch_in_orders(int orders, const Module& module, std::string_view kernel, Dim3 grid, Dim3 block,
                                      std::uint32_t dynamic_lds, std::span<const std::byte> kernargs,
                                      const LaunchOptions& options) const {
  if (orders < 2) throw Error("launch_in_orders takes 2 orders or more, not " + std::to_string(orders));
  const Contents before(state_->memory);
  LaunchResult all;
  std::optional<Contents> first;
  for (int order = 0; order < orders; ++order) {
    LaunchOptions chosen = options;
    chosen.schedule = order == 0 ? Schedule::in_order : order == 1 ? Schedule::round_robin : Schedule::random;
    chosen.seed = options.seed + std::uint64_t(order > 2 ? order - 2 : 0);
    before.restore();
    const LaunchResult result = launch(module, kernel, grid, block, dynamic_lds, kernargs, chosen);
    merge_reports(all.reports, result.reports, options.max_reports);
    all.statistics = result.statistics;
    if (!first) first.emplace(state_->memory);
    const std::string where = first->difference();
    if (where.empty()) continue;
    Report report;
    report.kind = "wave-order", report.kernel = kernel, report.target = module.target();
    report.message = where + (order == 1 ? " in order and round robin"
                                         : " in order and in the random order of seed " + std::to_string(chosen.seed));
    merge_reports(all.reports, {report}, options.max_reports);
  }
  return all;
}

double Statistics::matrix_share() const {
  const auto found = by_class.find("matrix");
  return instructions && found != by_class.end() ? double(found->second) / double(instructions) : 0.0;
}

std::string Report::to_string() const {
  if (pc == 0) return kind + ": kernel " + kernel + " (" + target + "): " + message;
  char where[96];
  std::snprintf(where, sizeof where, "workgroup (%u, %u, %u), wave %d", workgroup.x, workgroup.y, workgroup.z, wave);
  std::string out = kind + ": kernel " + kernel + " (" + target + "), " + where;
  if (lane >= 0) out += ", lane " + std::to_string(lane);
  std::snprintf(where, sizeof where, ", 0x%llx: ", static_cast<unsigned long long>(pc));
  out += where + instruction + ": " + message;
  if (count > 1) out += " (" + std::to_string(count) + " times)";
  return out;
}

}  // namespace gfxsim
