// gfxsim run: arguments from the command line, one launch, findings and counts as text or JSON.
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>

#include "commands.h"

namespace gfxsim::cli {
namespace {

std::uint16_t round_to_half(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits < 0x38800000) return sign;  // random numbers this small are of no interest
  return std::uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

class ArgumentList {
 public:
  ArgumentList(Device& device, std::uint64_t seed) : device_(device), random_(seed) {}

  void add(const std::string& text) {
    const auto colon = text.find(':');
    if (colon == std::string::npos) throw Error("--arg takes KIND:VALUE, not '" + text + "'");
    const std::string kind = text.substr(0, colon), value = text.substr(colon + 1);
    buffer_of_.push_back(nullptr);
    if (kind == "i32") {
      put(std::int32_t(std::strtoll(value.c_str(), nullptr, 0)));
    } else if (kind == "i64") {
      put(std::int64_t(std::strtoll(value.c_str(), nullptr, 0)));
    } else if (kind == "f32") {
      put(std::strtof(value.c_str(), nullptr));
    } else if (kind == "buffer") {
      add_buffer(std::vector<std::byte>(std::strtoull(value.c_str(), nullptr, 0)));
    } else if (kind == "file") {
      add_buffer(read_file(value));
    } else if (kind == "random") {
      add_buffer(random_bytes(value));
    } else if (kind == "bytes") {
      for (std::size_t i = 0; i + 1 < value.size(); i += 2)
        bytes_.push_back(std::byte(std::strtoul(value.substr(i, 2).c_str(), nullptr, 16)));
    } else {
      throw Error("--arg takes i32, i64, f32, buffer, random, file or bytes, not '" + kind + "'");
    }
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void dump(std::size_t argument, const std::string& path) const {
    if (argument >= buffer_of_.size() || !buffer_of_[argument])
      throw Error("--dump: argument " + std::to_string(argument) + " is no buffer");
    std::ofstream file(path, std::ios::binary);
    const auto& buffer = *buffer_of_[argument];
    file.write(reinterpret_cast<const char*>(buffer.data()), std::streamsize(buffer.size()));
    if (!file) throw Error("cannot write '" + path + "'");
  }

 private:
  template <class T>
  void put(T value) {
    const std::size_t at = (bytes_.size() + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }
  void add_buffer(std::vector<std::byte> data) {
    buffers_.push_back(std::move(data));
    buffer_of_.back() = &buffers_.back();
    device_.register_buffer(buffers_.back().data(), buffers_.back().size(),
                            "argument " + std::to_string(buffer_of_.size() - 1));
    put(buffers_.back().data());
  }
  std::vector<std::byte> random_bytes(const std::string& text) {
    const auto colon = text.find(':');
    const std::string type = text.substr(0, colon);
    const std::size_t count = colon == std::string::npos ? 0 : std::strtoull(text.c_str() + colon + 1, nullptr, 0);
    if (count == 0 || (type != "f32" && type != "f16" && type != "bf16"))
      throw Error("--arg random takes TYPE:COUNT with TYPE f32, f16 or bf16, not '" + text + "'");
    const std::size_t size = type == "f32" ? 4 : 2;
    std::vector<std::byte> out(count * size);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = normal(random_);
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
      const std::uint16_t small = type == "f16" ? round_to_half(value) : std::uint16_t(bits >> 16);
      std::memcpy(out.data() + i * size, size == 4 ? static_cast<const void*>(&bits) : &small, size);
    }
    return out;
  }

  Device& device_;
  std::mt19937_64 random_;
  std::vector<std::byte> bytes_;
  std::deque<std::vector<std::byte>> buffers_;
  std::vector<const std::vector<std::byte>*> buffer_of_;  // of each argument; null: a value
};

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
  for (const std::string& text : options.arguments) arguments.add(text);
  LaunchOptions launch = options.launch;
  launch.statistics = true;
  const LaunchResult result =
      device.launch(*module, options.kernel, options.grid, options.block, options.lds, arguments.bytes(), launch);
  for (const auto& [argument, path] : options.dumps) arguments.dump(argument, path);
  options.json ? print_json(result) : print_text(result);
  return result.ok() ? 0 : 1;
}

}  // namespace gfxsim::cli
