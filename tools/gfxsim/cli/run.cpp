// gfxsim run: arguments from the command line, one launch, findings and counts as text or JSON.
#include <cinttypes>
#include <cstdio>

#include "commands.h"

namespace gfxsim::cli {
namespace {

void print_map(const char* name, const std::map<std::string, std::uint64_t>& counts) {
  std::printf(", \"%s\": {", name);
  const char* comma = "";
  for (const auto& [key, count] : counts)
    std::printf("%s%s: %" PRIu64, comma, quoted(key).c_str(), count), comma = ", ";
  std::printf("}");
}

void print_json(const LaunchResult& result) {
  std::printf("{\"reports\": [");
  const char* comma = "";
  for (const Report& r : result.reports) {
    std::printf(
        "%s\n  {\"kind\": %s, \"kernel\": %s, \"target\": %s, \"workgroup\": [%u, %u, %u], \"wave\": %d, \"lane\": %d, "
        "\"pc\": %" PRIu64 ", \"instruction\": %s, \"message\": %s, \"count\": %" PRIu64 "}",
        comma, quoted(r.kind).c_str(), quoted(r.kernel).c_str(), quoted(r.target).c_str(), r.workgroup.x, r.workgroup.y,
        r.workgroup.z, r.wave, r.lane, r.pc, quoted(r.instruction).c_str(), quoted(r.message).c_str(), r.count);
    comma = ",";
  }
  const Statistics& s = result.statistics;
  std::printf("],\n\"statistics\": {\"instructions\": %" PRIu64 ", \"matrix_share\": %.6f, \"matrix_flops\": %" PRIu64
              ", \"lds_clocks\": %" PRIu64 ", \"lds_conflict_clocks\": %" PRIu64 ", \"global_bytes\": %" PRIu64
              ", \"global_lines\": %" PRIu64,
              s.instructions, s.matrix_share(), s.matrix_flops, s.lds_clocks, s.lds_conflict_clocks, s.global_bytes,
              s.global_lines);
  print_map("by_class", s.by_class);
  print_map("by_opcode", s.by_opcode);
  std::printf("}}\n");
}

void print_text(const LaunchResult& result) {
  for (const Report& report : result.reports) std::printf("%s\n", report.to_string().c_str());
  const Statistics& s = result.statistics;
  std::printf("%" PRIu64 " instructions, %.1f %% matrix; LDS %" PRIu64 " clocks, %" PRIu64
              " of them bank conflicts; global %" PRIu64 " bytes in %" PRIu64 " lines\n",
              s.instructions, 100 * s.matrix_share(), s.lds_clocks, s.lds_conflict_clocks, s.global_bytes,
              s.global_lines);
  for (const auto& [name, count] : s.by_class) std::printf("  %12" PRIu64 "  %s\n", count, name.c_str());
  std::printf("%zu findings\n", result.reports.size());
}

}  // namespace

int run(const Options& options) {
  if (options.kernel.empty()) throw Error("run needs --kernel NAME");
  Device device(options.target);
  const auto module = device.load(read_file(options.file));
  ArgumentList arguments(device, options.launch.seed);
  Dim3 grid = options.grid, block = options.block;
  if (!options.attention.empty()) add_attention(options.attention, options, arguments, grid, block);
  for (const std::string& text : options.arguments) arguments.add(text);
  LaunchOptions launch = options.launch;
  launch.statistics = true;
  const LaunchResult result =
      options.compare_orders
          ? device.launch_in_orders(options.compare_orders, *module, options.kernel, grid, block, options.lds,
                                    arguments.bytes(), launch)
          : device.launch(*module, options.kernel, grid, block, options.lds, arguments.bytes(), launch);
  for (const auto& [buffer, path] : options.dumps) arguments.dump(buffer, path);
  options.json ? print_json(result) : print_text(result);
  return result.ok() ? 0 : 1;
}

}  // namespace gfxsim::cli
