#include <cstdlib>
#include <functional>

#include "commands.h"

namespace gfxsim::cli {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> out(1);
  for (const char c : text) {
    if (c == separator) {
      out.emplace_back();
    } else {
      out.back() += c;
    }
  }
  return out;
}

std::uint64_t number(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text.c_str(), &end, 0);
  if (text.empty() || *end || text[0] == '-')
    throw Error(option + " takes a number that is not negative, not '" + text + "'");
  return value;
}

Dim3 dimensions(const std::string& option, const std::string& text) {
  const auto parts = split(text, ',');
  if (parts.size() > 3) throw Error(option + " takes one to three numbers, not '" + text + "'");
  Dim3 out;
  std::uint32_t* const axes[] = {&out.x, &out.y, &out.z};
  for (std::size_t i = 0; i < parts.size(); ++i) *axes[i] = std::uint32_t(number(option, parts[i]));
  return out;
}

}  // namespace

Options parse_options(const std::vector<std::string>& words) {
  Options out;
  out.command = words.at(0);
  const std::map<std::string, std::function<void(const std::string&)>> with_value = {
      {"--target", [&](const std::string& v) { out.target = v; }},
      {"--kernel", [&](const std::string& v) { out.kernel = v; }},
      {"--grid", [&](const std::string& v) { out.grid = dimensions("--grid", v); }},
      {"--block", [&](const std::string& v) { out.block = dimensions("--block", v); }},
      {"--lds", [&](const std::string& v) { out.lds = std::uint32_t(number("--lds", v)); }},
      {"--arg", [&](const std::string& v) { out.arguments.push_back(v); }},
      {"--schedule", [&](const std::string& v) { out.launch.schedule = parse_schedule(v); }},
      {"--seed", [&](const std::string& v) { out.launch.seed = number("--seed", v); }},
      {"--check", [&](const std::string& v) { out.launch.checks = parse_checks(v); }},
      {"--threads", [&](const std::string& v) { out.launch.threads = int(number("--threads", v)); }},
      {"--attention", [&](const std::string& v) { out.attention = v; }},
      {"--compare-orders", [&](const std::string& v) { out.compare_orders = int(number("--compare-orders", v)); }},
      {"--nop-at", [&](const std::string& v) { out.launch.nop_at = number("--nop-at", v); }},
      {"--max-instructions",
       [&](const std::string& v) { out.launch.max_wave_instructions = number("--max-instructions", v); }},
      {"--dump", [&](const std::string& v) {
         const auto equals = v.find('=');
         if (equals == std::string::npos) throw Error("--dump takes BUFFER=PATH, not '" + v + "'");
         out.dumps[v.substr(0, equals)] = v.substr(equals + 1);
       }}};
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "--json") {
      out.json = true;
    } else if (words[i] == "--fail-fast") {
      out.fail_fast = true;
    } else if (const auto option = with_value.find(words[i]); option != with_value.end()) {
      if (i + 1 == words.size()) throw Error(words[i] + " needs a value");
      option->second(words[++i]);
    } else if (words[i].rfind("--", 0) == 0) {
      throw Error("unknown option " + words[i] + "; see gfxsim --help");
    } else if (out.file.empty()) {
      out.file = words[i];
    } else {
      throw Error("'" + words[i] + "' is one file too many");
    }
  }
  return out;
}

}  // namespace gfxsim::cli
