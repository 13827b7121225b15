#include "text.h"

#include <bit>
#include <cstdlib>

namespace gfxsim {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> out;
  std::string piece;
  int depth = 0;
  const auto finish = [&] {
    const auto first = piece.find_first_not_of(" \t"), last = piece.find_last_not_of(" \t");
    if (first != std::string::npos) out.push_back(piece.substr(first, last - first + 1));
    piece.clear();
  };
  for (const char c : text) {
    depth += c == '[' || c == '(' ? 1 : c == ']' || c == ')' ? -1 : 0;
    if (c == separator && depth == 0) {
      finish();
    } else {
      piece += c;
    }
  }
  finish();
  return out;
}

std::optional<std::int64_t> parse_integer(std::string_view text) {
  const std::string copy(text);
  if (copy.empty()) return std::nullopt;
  char* end = nullptr;
  const bool hexadecimal = copy.find("0x") != std::string::npos;
  const std::int64_t value = hexadecimal && copy[0] != '-' ? std::int64_t(std::strtoull(copy.c_str(), &end, 16))
                                                           : std::strtoll(copy.c_str(), &end, hexadecimal ? 16 : 10);
  if (*end) return std::nullopt;
  return value;
}

std::vector<std::int64_t> parse_list(std::string_view text) {
  std::vector<std::int64_t> out;
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') return out;
  for (const std::string& piece : split(text.substr(1, text.size() - 2), ','))
    if (const auto number = parse_integer(piece)) out.push_back(*number);
  return out;
}

std::optional<std::int64_t> parse_swizzle(std::string_view text) {
  if (!starts_with(text, "swizzle(") || text.back() != ')') return parse_integer(text);
  const auto parts = split(text.substr(8, text.size() - 9), ',');
  if (parts.empty()) return std::nullopt;
  std::vector<std::int64_t> number;
  for (std::size_t i = 1; i < parts.size(); ++i) number.push_back(parse_integer(parts[i]).value_or(-1));
  const auto bitmask = [](std::int64_t and_mask, std::int64_t or_mask, std::int64_t xor_mask) {
    return and_mask | or_mask << 5 | xor_mask << 10;
  };
  if (parts[0] == "SWAP" && number.size() == 1) return bitmask(31, 0, number[0]);
  if (parts[0] == "REVERSE" && number.size() == 1) return bitmask(31, 0, number[0] - 1);
  if (parts[0] == "BROADCAST" && number.size() == 2) return bitmask(32 - number[0], number[1], 0);
  if (parts[0] == "QUAD_PERM" && number.size() == 4)
    return 0x8000 | number[0] | number[1] << 2 | number[2] << 4 | number[3] << 6;
  if (parts[0] == "BITMASK_PERM" && parts.size() == 2 && parts[1].size() == 7) {
    std::int64_t masks[3] = {};  // and, or, xor
    for (int i = 0; i < 5; ++i) {
      const std::int64_t bit = std::int64_t(16) >> i;
      const char c = parts[1][std::size_t(i) + 1];  // within quotation marks, the highest bit first
      if (c == 'p' || c == 'i') masks[0] |= bit;
      if (c == '1') masks[1] |= bit;
      if (c == 'i') masks[2] |= bit;
    }
    return bitmask(masks[0], masks[1], masks[2]);
  }
  return std::nullopt;
}

}  // namespace gfxsim
