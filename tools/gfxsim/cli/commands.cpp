#include "commands.h"

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

namespace gfxsim::cli {
namespace {

struct Loaded {
  Device device;
  std::shared_ptr<const Module> module;
  explicit Loaded(const Options& options) : device(options.target), module(device.load(read_file(options.file))) {}
};

std::vector<KernelInfo> chosen(const Options& options, const Module& module) {
  std::vector<KernelInfo> out;
  for (const KernelInfo& kernel : module.kernels())
    if (options.kernel.empty() || kernel.name == options.kernel) out.push_back(kernel);
  if (out.empty()) throw Error("no kernel '" + options.kernel + "' in " + options.file);
  return out;
}

int disasm(const Options& options) {
  const Loaded loaded(options);
  bool first = true;
  if (options.json) std::printf("[");
  for (const KernelInfo& kernel : chosen(options, *loaded.module)) {
    if (!options.json) std::printf("%s:\n", kernel.name.c_str());
    for (const Instruction& i : loaded.module->instructions(kernel.name)) {
      const std::string why = !i.unsupported.empty() ? i.unsupported : i.unit_checked ? "" : "no unit check";
      if (options.json) {
        std::printf("%s\n{\"kernel\": %s, \"pc\": %" PRIu64 ", \"opcode\": %s, \"text\": %s, \"problem\": %s}",
                    first ? "" : ",", quoted(kernel.name).c_str(), i.pc, quoted(i.opcode).c_str(),
                    quoted(i.text).c_str(), quoted(why).c_str());
      } else {
        std::printf("  %6" PRIx64 "  %s%s\n", i.pc, i.text.c_str(), why.empty() ? "" : ("    <-- " + why).c_str());
      }
      first = false;
    }
  }
  if (options.json) std::printf("\n]\n");
  return 0;
}

int stats(const Options& options) {
  const Loaded loaded(options);
  std::string separator = "[";
  for (const KernelInfo& k : chosen(options, *loaded.module)) {
    std::map<std::string, int> counts;
    std::set<std::string> problems;
    for (const Instruction& i : loaded.module->instructions(k.name)) {
      ++counts[i.opcode];
      if (!i.unsupported.empty() || !i.unit_checked) problems.insert(i.opcode);
    }
    if (options.json) {
      std::printf(
          "%s\n{\"kernel\": %s, \"wavefront_size\": %d, \"vgprs\": %d, \"agprs\": %d, \"sgprs\": %d, \"vgpr_spills\": "
          "%d, "
          "\"sgpr_spills\": %d, \"lds_bytes\": %u, \"scratch_bytes\": %u, \"opcodes\": {",
          separator.c_str(), quoted(k.name).c_str(), k.wavefront_size, k.vgprs, k.agprs, k.sgprs, k.vgpr_spills,
          k.sgpr_spills, k.lds_bytes, k.scratch_bytes);
      const char* comma = "";
      for (const auto& [name, count] : counts)
        std::printf("%s%s: %d", comma, quoted(name).c_str(), count), comma = ", ";
      std::printf("}, \"not_simulated\": [");
      comma = "";
      for (const std::string& name : problems) std::printf("%s%s", comma, quoted(name).c_str()), comma = ", ";
      std::printf("]}");
      separator = ",";
      continue;
    }
    std::printf("%s: wave%d, %d vgprs, %d agprs, %d sgprs, %d+%d spills, %u B LDS, %u B scratch\n", k.name.c_str(),
                k.wavefront_size, k.vgprs, k.agprs, k.sgprs, k.vgpr_spills, k.sgpr_spills, k.lds_bytes,
                k.scratch_bytes);
    for (const auto& [name, count] : counts)
      std::printf("  %6d  %s%s\n", count, name.c_str(),
                  problems.count(name) ? "    <-- not simulated or not unit-checked" : "");
  }
  if (options.json) std::printf("\n]\n");
  return 0;
}

// The opcodes of a code object, and whether each is simulated and has a unit check.
int opcodes_of_file(const Options& options) {
  const Loaded loaded(options);
  struct Use {
    int count = 0;
    std::string problem;
  };
  std::map<std::string, Use> uses;
  for (const KernelInfo& kernel : chosen(options, *loaded.module))
    for (const Instruction& i : loaded.module->instructions(kernel.name)) {
      Use& use = uses[i.opcode];
      ++use.count;
      if (!i.unsupported.empty()) {
        use.problem = "'" + i.text + "' is not simulated: " + i.unsupported;
      } else if (!i.unit_checked && use.problem.empty()) {
        use.problem = "no unit check";
      }
    }
  int problems = 0;
  const char* separator = "[";
  for (const auto& [name, use] : uses) {
    problems += !use.problem.empty();
    if (options.json) {
      std::printf("%s\n{\"opcode\": %s, \"count\": %d, \"problem\": %s}", separator, quoted(name).c_str(), use.count,
                  quoted(use.problem).c_str());
      separator = ",";
    } else {
      std::printf("%8d  %s%s\n", use.count, name.c_str(),
                  use.problem.empty() ? "" : ("    <-- " + use.problem).c_str());
    }
  }
  options.json ? std::printf("\n]\n") : std::printf("%zu opcodes, %d problems\n", uses.size(), problems);
  return problems ? 1 : 0;
}

int opcodes(const Options& options) {
  if (!options.file.empty()) return opcodes_of_file(options);
  const char* separator = "[";
  for (const std::string& name : supported_opcodes(options.target)) {
    if (options.json) {
      std::printf("%s\n{\"opcode\": %s, \"unit_checked\": %s}", separator, quoted(name).c_str(),
                  is_unit_checked(name) ? "true" : "false");
      separator = ",";
    } else {
      std::printf("%s%s\n", name.c_str(), is_unit_checked(name) ? "" : "    (no unit check)");
    }
  }
  if (options.json) std::printf("\n]\n");
  return 0;
}

int selfcheck(const Options& options) {
  int failed = 0;
  for (const OpcodeCheck& check : opcode_checks()) {
    const std::string difference = check.run(options.launch.seed);
    if (difference.empty()) continue;
    ++failed;
    std::printf("%s (%s): %s\n", check.instruction.c_str(), check.target.c_str(), difference.c_str());
    if (options.fail_fast) return 1;
  }
  std::printf("%zu unit checks, %d failed\n", opcode_checks().size(), failed);
  return failed ? 1 : 0;
}

}  // namespace

std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot read '" + path + "'");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

int dispatch(const Options& options) {
  const std::map<std::string, int (*)(const Options&)> commands = {
      {"run", run}, {"disasm", disasm}, {"stats", stats}, {"opcodes", opcodes}, {"selfcheck", selfcheck}};
  const auto found = commands.find(options.command);
  if (found == commands.end()) throw Error("unknown command '" + options.command + "'; see gfxsim --help");
  const bool needs_file = options.command != "opcodes" && options.command != "selfcheck";
  if (needs_file && options.file.empty()) throw Error(options.command + " needs the file of a code object");
  return found->second(options);
}

}  // namespace gfxsim::cli
