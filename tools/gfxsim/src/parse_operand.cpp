#include "parse_operand.h"

#include <bit>
#include <cctype>
#include <cstdlib>
#include <map>

#include "half.h"
#include "text.h"

namespace gfxsim {
namespace {

struct Named {
  Kind kind;
  std::uint16_t reg;
  std::uint8_t dwords;
  std::uint64_t bits;
};

// 64-bit names are pairs; in wave32 code the halves appear by their own names.
const std::map<std::string, Named, std::less<>>& named_operands() {
  static const std::map<std::string, Named, std::less<>> names = {
      {"vcc", {Kind::scalar, kVcc, 2, 0}},
      {"vcc_lo", {Kind::scalar, kVcc, 1, 0}},
      {"vcc_hi", {Kind::scalar, kVcc + 1, 1, 0}},
      {"exec", {Kind::scalar, kExec, 2, 0}},
      {"exec_lo", {Kind::scalar, kExec, 1, 0}},
      {"exec_hi", {Kind::scalar, kExec + 1, 1, 0}},
      {"flat_scratch", {Kind::scalar, kFlatScratch, 2, 0}},
      {"flat_scratch_lo", {Kind::scalar, kFlatScratch, 1, 0}},
      {"flat_scratch_hi", {Kind::scalar, kFlatScratch + 1, 1, 0}},
      {"m0", {Kind::scalar, kM0, 1, 0}},
      {"null", {Kind::scalar, kNull, 1, 0}},
      {"scc", {Kind::scc, 0, 1, 0}},
      {"src_scc", {Kind::scc, 0, 1, 0}},
      {"off", {Kind::none, 0, 0, 0}},
      {"src_shared_base", {Kind::constant, 0, 2, kSharedAperture}},
      {"src_private_base", {Kind::constant, 0, 2, kPrivateAperture}},
  };
  return names;
}

// v7, v7.h, s[4:5], a[0:15], ttmp9, ttmp[4:5].
bool parse_register(std::string_view text, Operand& out) {
  if (starts_with(text, "v") && (text.ends_with(".l") || text.ends_with(".h"))) {
    out.part = text.back() == 'l' ? Part::word0 : Part::word1;
    text.remove_suffix(2);
  }
  std::string_view file;
  for (const std::string_view name : {"ttmp", "v", "a", "s"})
    if (starts_with(text, name)) {
      file = name;
      break;
    }
  if (file.empty()) return false;
  std::string_view rest = text.substr(file.size());
  std::int64_t first = 0, last = 0;
  if (!rest.empty() && rest.front() == '[' && rest.back() == ']') {
    const std::string_view inside = rest.substr(1, rest.size() - 2);
    const auto colon = inside.find(':');
    const auto low = parse_integer(inside.substr(0, colon));
    const auto high = colon == std::string_view::npos ? low : parse_integer(inside.substr(colon + 1));
    if (!low || !high) return false;
    first = *low, last = *high;
  } else {
    if (rest.empty() || !std::isdigit(static_cast<unsigned char>(rest.front()))) return false;
    const auto number = parse_integer(rest);
    if (!number) return false;
    first = last = *number;
  }
  const bool is_vector = file == "v" || file == "a";
  if (first < 0 || last < first || last > (is_vector ? 255 : file == "s" ? 105 : 15)) return false;
  out.kind = is_vector ? Kind::vector : Kind::scalar;
  out.reg = std::uint16_t(first + (file == "a" ? kAgpr0 : file == "ttmp" ? kTtmp0 : 0));
  out.dwords = std::uint8_t(last - first + 1);
  return true;
}

bool parse_constant(std::string_view text, Literal literal, Operand& out) {
  out.kind = Kind::constant;
  out.dwords = literal == Literal::b64 || literal == Literal::f64 ? 2 : 1;
  if (const auto integer = parse_integer(text)) {
    out.bits = std::uint64_t(*integer);
    // A 32-bit literal is the upper half of a double.
    if (literal == Literal::f64 && text.find('x') != std::string_view::npos) out.bits <<= 32;
    return true;
  }
  const std::string copy(text);
  char* end = nullptr;
  const double number = std::strtod(copy.c_str(), &end);
  if (copy.empty() || *end) return false;
  const bool reciprocal_of_two_pi = starts_with(copy, "0.15915");
  switch (literal) {
    case Literal::b32:
      out.bits = reciprocal_of_two_pi ? 0x3e22f983u : std::bit_cast<std::uint32_t>(float(number));
      break;
    case Literal::f16: out.bits = reciprocal_of_two_pi ? 0x3118u : to_half(float(number)).bits; break;
    case Literal::b64:
    case Literal::f64:
      out.bits = reciprocal_of_two_pi ? 0x3fc45f306dc9c882u : std::bit_cast<std::uint64_t>(number);
      break;
  }
  return true;
}

}  // namespace

bool parse_operand(std::string_view text, Literal literal, Operand& out) {
  out = {};
  if (parse_constant(text, literal, out)) return true;
  out = {};
  if (starts_with(text, "-")) {
    out.negate = true;
    text.remove_prefix(1);
  }
  if (text.size() > 2 && text.front() == '|' && text.back() == '|') {
    out.absolute = true;
    text = text.substr(1, text.size() - 2);
  }
  if (starts_with(text, "sext(") && text.back() == ')') {
    out.sign_extend = true;
    text = text.substr(5, text.size() - 6);
  }
  if (const auto named = named_operands().find(text); named != named_operands().end()) {
    out.kind = named->second.kind;
    out.reg = named->second.reg;
    out.dwords = named->second.dwords;
    out.bits = named->second.bits;
    return true;
  }
  if (parse_register(text, out)) return true;
  const bool negate = out.negate, absolute = out.absolute;
  const bool known = parse_constant(text, literal, out);
  out.negate = negate, out.absolute = absolute;
  return known;
}

}  // namespace gfxsim
