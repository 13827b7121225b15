// The list of barriers and waits that may be left out of the shipped kernels unnoticed. Lines of tab-separated fields:
//
//   target, kernel, instruction, numbers, reason
//
// numbers ("0,3-11") count the kernel's instructions of that text, so that addresses and other code may change.
#pragma once

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace flash_attn::testing {

struct NopEntry {
  std::string target, kernel, text;
  int number = 0;
  std::string reason;
};

inline const NopEntry* find_entry(const std::vector<NopEntry>& list, const NopEntry& wanted) {
  for (const NopEntry& entry : list)
    if (std::tie(entry.target, entry.kernel, entry.text, entry.number) ==
        std::tie(wanted.target, wanted.kernel, wanted.text, wanted.number))
      return &entry;
  return nullptr;
}

inline std::vector<NopEntry> read_nop_list(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read the list '" + path + "'");
  std::vector<NopEntry> out;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    NopEntry entry;
    std::string numbers, range;
    for (std::string* field : {&entry.target, &entry.kernel, &entry.text, &numbers, &entry.reason})
      if (!std::getline(fields, *field, '\t')) throw std::runtime_error(path + ": fewer than five fields: " + line);
    for (std::istringstream ranges(numbers); std::getline(ranges, range, ',');) {
      const std::size_t dash = range.find('-');
      const int last = std::stoi(dash == std::string::npos ? range : range.substr(dash + 1));
      for (entry.number = std::stoi(range); entry.number <= last; ++entry.number) out.push_back(entry);
    }
  }
  return out;
}

// "0,3-11" from sorted numbers.
inline std::string ranges_of(const std::vector<int>& numbers) {
  std::string out;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    out += (out.empty() ? "" : ",") + std::to_string(numbers[i]);
    if (end - i > 1) out += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return out;
}

inline void write_nop_list(const std::string& path, std::vector<NopEntry> entries) {
  const auto group = [](const NopEntry& e) { return std::tie(e.target, e.kernel, e.text, e.reason); };
  std::sort(entries.begin(), entries.end(), [&](const NopEntry& a, const NopEntry& b) {
    return std::tuple_cat(group(a), std::tie(a.number)) < std::tuple_cat(group(b), std::tie(b.number));
  });
  std::ofstream file(path);
  file << "# Barriers and waits of the shipped kernels that may be left out unnoticed, and why. By nop_sweep --write.\n"
          "# target, kernel, instruction, its numbers among the kernel's instructions of that text, reason\n";
  for (std::size_t i = 0; i < entries.size();) {
    const NopEntry& first = entries[i];
    std::vector<int> numbers;
    for (; i < entries.size() && group(entries[i]) == group(first); ++i) numbers.push_back(entries[i].number);
    file << first.target << '\t' << first.kernel << '\t' << first.text << '\t' << ranges_of(numbers) << '\t'
         << first.reason << '\n';
  }
  if (!file.flush()) throw std::runtime_error("cannot write the list '" + path + "'");
}

}  // namespace flash_attn::testing
