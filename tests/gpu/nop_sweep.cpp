// Are the kernels' barriers and waits needed, and does the simulator notice when one is missing? Each is left out, one
// at a time, on problems that walk through all of the kernel.
//
//   nop_sweep DIRECTORY LIST [--only TEXT ...] [--write]
//
// DIRECTORY holds the code objects of the target it is named after. LIST (nop_list.h) holds the barriers and waits
// whose absence is not noticed, with the reason. Exit status 1 when one goes unnoticed that is not in the list, unless
// the run itself shows why (nothing was on its way), or when one in the list is noticed. --only: kernels whose name
// holds TEXT.
// --write rewrites the lines of the kernels that were looked at; reasons that a person gave stay.
#include <algorithm>
#include <cstdio>
#include <set>

#include "kernel_backward.h"
#include "kernel_forward.h"
#include "nop_list.h"
#include "simulated_device.h"

namespace flash_attn {
std::int64_t size_of(DType dtype) noexcept { return dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2; }
}  // namespace flash_attn

namespace flash_attn::testing {
namespace {

// A barrier or wait of a kernel, and what is known of it so far.
struct Site {
  std::uint64_t pc = 0;
  std::string text;
  int number = 0;  // among the kernel's instructions of this text
  bool executed = false, noticed = false;
  unsigned waited_for = 0;  // gfxsim::WaitedFor
  bool is_barrier() const { return text.rfind("s_barrier", 0) == 0; }
};

bool is_site(const gfxsim::Instruction& instruction) {
  // s_wait_alu, s_waitcnt_depctr, s_delay_alu and s_nop order pipelines inside of a wave, which are not simulated.
  const std::string& name = instruction.opcode;
  return instruction.kind == "barrier" ||
         (name.rfind("s_wait", 0) == 0 && name != "s_wait_alu" && name != "s_waitcnt_depctr");
}

std::vector<Site> find_sites(const gfxsim::Module& module, const std::string& kernel) {
  std::vector<Site> out;
  std::map<std::string, int> numbers;
  for (const gfxsim::Instruction& instruction : module.instructions(kernel))
    if (is_site(instruction)) {
      out.push_back({});
      out.back().pc = instruction.pc, out.back().text = instruction.text;
      out.back().number = numbers[instruction.text]++;
    }
  return out;
}

// Leaves out the sites of one kernel at each of its launches; other kernels just run.
class SweepingDevice final : public SimulatedDevice {
 public:
  using SimulatedDevice::SimulatedDevice;
  void sweep(const std::string& kernel) { kernel_ = kernel, sites_.clear(); }
  const std::vector<Site>& sites() const { return sites_; }

 private:
  void before(const SimulatedLaunch& launch) override {
    if (launch.kernel != kernel_) return;
    if (sites_.empty()) sites_ = find_sites(launch.module, kernel_);
    gfxsim::LaunchOptions chosen = options(1);
    chosen.statistics = true;
    const gfxsim::Statistics counts = run(launch, chosen).statistics;
    chosen.statistics = false, chosen.max_reports = 1, chosen.max_wave_instructions = 1 << 22;
    for (Site& site : sites_) {
      if (!counts.by_address.count(site.pc)) continue;
      site.executed = true;
      if (const auto waited = counts.waited_for.find(site.pc); waited != counts.waited_for.end())
        site.waited_for |= waited->second;
      // A wait for nothing changes nothing.
      if (!site.is_barrier() && !site.waited_for) continue;
      chosen.nop_at = site.pc;
      for (chosen.seed = 1; !site.noticed && chosen.seed <= 2; ++chosen.seed) site.noticed = !run(launch, chosen).ok();
    }
  }

  std::string kernel_;
  std::vector<Site> sites_;
};

// Problems that together walk through all of a kernel: full and partial tiles, masks, every feature it has.
std::vector<KernelCase> cases(const gpu::KernelRow& row) {
  const bool by_query = row.family == gpu::Family::forward || row.family == gpu::Family::forward_dmask ||
                        row.family == gpu::Family::backward_dq || row.family == gpu::Family::backward_delta;
  const std::int64_t kept = row.block_rows() - 5, streamed = 3 * row.streamed_rows + 7;
  const std::int64_t Sq = by_query ? kept : streamed, Sk = by_query ? streamed : kept;
  // The preprocess serves every width, with the kernels of that width beside it.
  const std::int64_t D = row.family == gpu::Family::backward_delta ? 128 : row.D;
  std::vector<KernelCase> out;
  const auto add = [&](std::int64_t q, std::int64_t k, Features features = {}) -> KernelCase& {
    out.push_back({"", {1, 2, 1, q, k, D, D}, features, {}, {}, 0, false, 0.0});
    return out.back();
  };
  add(Sq, Sk);
  Features causal;
  causal.causal = true;
  add(Sq, Sq + row.streamed_rows, causal);
  const auto add_packed = [&](Features features) {
    KernelCase& c = add(Sq, Sk, features);
    c.shape.B = 3, c.q_lengths = {int(Sq), 0, 5}, c.k_lengths = {int(Sk), 9, 0}, c.extra_rows = 3;
  };
  add_packed(causal);
  if (row.variant == gpu::Variant::plain) return out;
  Features everything;
  everything.alibi = true, everything.dropout_p = 0.4, everything.window_left = 40, everything.causal = true;
  add(Sq, Sk, everything);
  Features softcap;
  softcap.softcap = 3.0;
  add(Sq, Sk, softcap).misaligned = true;
  add(Sq, Sk, everything).misaligned = true;
  add_packed(everything);
  // Rows of whole dwords, but not of 16 bytes.
  KernelCase& narrow = add(Sq, Sk, everything);
  narrow.shape.D = narrow.shape.Dv = D - 2;
  return out;
}

constexpr const char* kUnexplained = "UNEXPLAINED";
constexpr const char* kNothing = "on the paths taken, nothing is on its way: another wait came before";

std::string reason(const Site& site) {
  if (!site.executed) return "not executed by the problems of this check";
  if (site.is_barrier()) return kUnexplained;
  if (!site.waited_for) return kNothing;
  if (!(site.waited_for & ~unsigned(gfxsim::kWaitedForStores)))
    return "it waits for stores to memory only, which no later instruction of the workgroup reads";
  return "on the paths taken, what it waits for is used only after another wait";
}

template <class Check>
void run_cases(SweepingDevice& device, const gpu::KernelRow& row) {
  for (const KernelCase& c : cases(row)) {
    if (needs_general(c, row.dtype) && row.variant == gpu::Variant::plain) continue;
    const double error = Check(device, c, row.dtype).run(row.variant);
    if (!(error >= 0 && error <= 1)) throw std::runtime_error(std::string(row.name) + " gives wrong results");
  }
}

class Sweep {
 public:
  Sweep(const std::string& directory, std::vector<NopEntry> known)
      : device_(directory), target_(device_.target_name()), known_(std::move(known)) {}

  // Whether every barrier and wait of the kernel is noticed or explained. UNEXPLAINED in the list asks for a person's
  // reason.
  bool kernel(const gpu::KernelRow& row) {
    device_.sweep(row.name);
    const bool forward = row.family == gpu::Family::forward || row.family == gpu::Family::forward_dmask;
    forward ? run_cases<ForwardCheck>(device_, row) : run_cases<BackwardCheck>(device_, row);
    int noticed = 0, listed = 0, wrong = 0;
    for (const Site& site : device_.sites()) {
      const NopEntry* const entry = find_entry(known_, {target_, row.name, site.text, site.number, ""});
      const std::string why = site.noticed ? "" : reason(site);
      const bool is_stale = entry && site.noticed && entry->reason != kNothing;
      const bool is_explained = site.noticed || why == kNothing ||
                                (entry && (why == kUnexplained ? entry->reason != why : entry->reason == why));
      noticed += site.noticed, listed += !site.noticed && is_explained, wrong += is_stale || !is_explained;
      if (is_stale || !is_explained)
        std::printf("  %s #%d at 0x%llx is %s\n", site.text.c_str(), site.number,
                    static_cast<unsigned long long>(site.pc),
                    is_stale ? "noticed, but in the list" : ("not noticed: " + why).c_str());
      if (!site.noticed)
        found_.push_back(
            {target_, row.name, site.text, site.number, why == kUnexplained && entry ? entry->reason : why});
    }
    std::printf("%s %-44s %3zu barriers and waits: %d noticed, %d explained\n", wrong ? "WRONG" : "ok   ", row.name,
                device_.sites().size(), noticed, listed);
    std::fflush(stdout);
    seen_.insert(row.name);
    return wrong == 0;
  }

  // The list with the kernels that were looked at replaced.
  std::vector<NopEntry> updated() const {
    std::vector<NopEntry> out;
    for (const NopEntry& entry : known_)
      if (entry.target != target_ || !seen_.count(entry.kernel)) out.push_back(entry);
    out.insert(out.end(), found_.begin(), found_.end());
    return out;
  }

  gpu::Target target() const { return device_.target(); }

 private:
  SweepingDevice device_;
  std::string target_;
  std::vector<NopEntry> known_, found_;
  std::set<std::string> seen_;
};

}  // namespace
}  // namespace flash_attn::testing

int main(int argc, char** argv) {
  using namespace flash_attn;
  std::vector<std::string> paths, only;
  bool write = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--write")
      write = true;
    else if (argument == "--only" && i + 1 < argc)
      only.push_back(argv[++i]);
    else
      paths.push_back(argument);
  }
  if (paths.size() != 2) {
    std::fprintf(stderr, "usage: nop_sweep DIRECTORY LIST [--only TEXT ...] [--write]\n");
    return 2;
  }
  try {
    testing::Sweep sweep(paths[0], testing::read_nop_list(paths[1]));
    bool ok = true;
    for (const gpu::KernelRow& row : gpu::kKernels) {
      const auto wanted = [&](const std::string& text) {
        return std::string(row.name).find(text) != std::string::npos;
      };
      // append and combine have neither barriers nor LDS; variants for caches wait as the general one does, and for
      // tables, which no problem here has.
      const bool swept = row.family != gpu::Family::append && row.family != gpu::Family::combine &&
                         row.variant != gpu::Variant::cache && row.variant != gpu::Variant::decode;
      if (row.target == sweep.target() && swept && (only.empty() || std::any_of(only.begin(), only.end(), wanted)))
        ok = sweep.kernel(row) && ok;
    }
    if (write) testing::write_nop_list(paths[1], sweep.updated());
    return ok ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nop_sweep: %s\n", error.what());
    return 2;
  }
}
