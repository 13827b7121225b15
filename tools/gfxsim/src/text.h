// Splitting the disassembler's text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gfxsim {

/// Splits at `separator` outside brackets and parentheses; pieces are trimmed and not empty.
std::vector<std::string> split(std::string_view text, char separator);

/// A decimal or hexadecimal integer that is all of `text`.
std::optional<std::int64_t> parse_integer(std::string_view text);

/// The integers of "[1,0,3]".
std::vector<std::int64_t> parse_list(std::string_view text);

/// The pattern of ds_swizzle_b32 from "swizzle(SWAP,16)" and its kin, or a plain number.
std::optional<std::int64_t> parse_swizzle(std::string_view text);

inline bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

}  // namespace gfxsim
