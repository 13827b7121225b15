#include "parse.h"

#include <algorithm>
#include <utility>

#include "opcode_table.h"
#include "parse_operand.h"
#include "text.h"
#include "waits.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

Op refuse(Op op, const std::string& why) {
  op.run = nullptr;
  op.unsupported = why;
  return op;
}

bool parse_wait(std::string_view text, Op& op) {
  op.offset0 = op.offset1 = kNoWait;
  if (op.opcode->name != "s_waitcnt") {
    constexpr std::string_view no_register = "null, ";
    if (starts_with(text, no_register)) text.remove_prefix(no_register.size());
    const auto count = parse_integer(text);
    op.offset0 = std::int32_t(count.value_or(0));
    return count.has_value();
  }
  for (const std::string& piece : split(text, ' ')) {
    const auto open = piece.find('(');
    if (open == std::string::npos || piece.back() != ')') return false;
    const auto count = parse_integer(std::string_view(piece).substr(open + 1, piece.size() - open - 2));
    const std::string name = piece.substr(0, open);
    if (!count) return false;
    if (name == "vmcnt") {
      op.offset0 = std::int32_t(*count);
    } else if (name == "lgkmcnt") {
      op.offset1 = std::int32_t(*count);
    } else if (name != "expcnt") {
      return false;
    }
  }
  return true;
}

// Constants of SOPK instructions are 16 bits, signed but for unsigned comparisons.
void extend_short_constant(const std::string& mnemonic, Op& op) {
  const bool is_short =
      starts_with(mnemonic, "s_movk_") || starts_with(mnemonic, "s_cmovk_") || starts_with(mnemonic, "s_addk_") ||
      starts_with(mnemonic, "s_mulk_") ||
      (starts_with(mnemonic, "s_cmpk_") && mnemonic.back() == '2' && mnemonic[mnemonic.size() - 3] == 'i');
  if (!is_short) return;
  Operand& last = op.operand[op.operands - 1];
  if (last.kind == Kind::constant) last.bits = std::uint64_t(std::int64_t(std::int16_t(last.bits)));
}

void note_range(Op& op, const Operand& operand, bool written) {
  if (operand.kind != Kind::vector && operand.kind != Kind::scalar) return;
  if (operand.kind == Kind::scalar && operand.reg == kNull) return;
  op.ranges.push_back({operand.kind, written, operand.reg, operand.dwords});
}

void note_ranges(const Target& target, Op& op) {
  const std::uint32_t traits = op.opcode->traits;
  if (starts_with(op.opcode->name, "ds_")) op.load_stream = kLds;
  if (op.opcode->kind == Class::vmem) op.load_stream = kLoads;
  // gfx11 writes halves of a register one by one: a load into one may follow a load into the other without a wait.
  const bool merges = op.load_stream == 255 || target.generation < 11;
  const int results = (traits & kReturnsByModifier) && !op.returns_data ? 0 : op.opcode->results;
  for (int i = 0; i < op.operands; ++i) note_range(op, op.operand[i], i < results);
  if (((traits & (kReadsResult | kAccumulates)) || op.keeps_rest) && merges) note_range(op, op.operand[0], false);
  // In waves of 32 its upper half is a register like others, which a load may be on its way into.
  const std::uint16_t vcc = target.generation == 9 ? 2 : 1;
  if (traits & kReadsVcc) op.ranges.push_back({Kind::scalar, false, kVcc, vcc});
  if (traits & kReadsM0) op.ranges.push_back({Kind::scalar, false, kM0, 1});
}

// Widths of operands that the text leaves open.
void settle_widths(const Target& target, Op& op) {
  const auto mask = [&](int i) {
    if (op.operand[i].kind == Kind::scalar) op.operand[i].dwords = target.generation == 9 ? 2 : 1;
  };
  const std::string& name = op.opcode->name;
  const bool carry = op.opcode->results == 2;
  if (carry) mask(1);
  if (starts_with(name, "v_cmp_")) mask(0);
  if (name == "v_cndmask_b32") mask(3);
  if (op.operands == 5 && (starts_with(name, "v_addc_") || starts_with(name, "v_subb"))) mask(4);
}

// What an inline constant means as the operand that comes next.
Literal literal_of_next(const Op& op) {
  const bool is_last = op.operands + 1 == op.opcode->operands;
  return (op.opcode->traits & kShortFactors) && !is_last ? Literal::b32 : op.opcode->literal;
}

// Why a modifier is refused.
std::string refusal(const std::string& modifier) {
  if (starts_with(modifier, "mul:") || starts_with(modifier, "div:"))
    return "hardware ignores the output modifier '" + modifier + "' while denormals are kept";
  return "the modifier or operand '" + modifier + "' is not simulated for this opcode";
}

std::string parse_operands(std::string_view rest, Op& op) {
  for (const std::string& piece : split(rest, ',')) {
    const auto words = split(piece, ' ');
    std::size_t first_modifier = 1;
    Operand operand;
    if (op.operands < int(op.operand.size()) && parse_operand(words[0], literal_of_next(op), operand)) {
      if (op.operands == 0 && op.opcode->results && operand.part != Part::dword) {
        op.result_part = std::exchange(operand.part, Part::dword);
        op.keeps_rest = true;
      }
      op.operand[op.operands++] = operand;
    } else {
      first_modifier = 0;
    }
    for (std::size_t i = first_modifier; i < words.size(); ++i)
      if (!parse_modifier(words[i], op)) return refusal(words[i]);
  }
  return "";
}

// gfx11 names a half of a register twice: v7.h, and a bit of op_sel.
void drop_repeated_selections(Op& op) {
  const int sources = op.operands - op.opcode->results;
  for (int source = 0; source < sources; ++source)
    if (op.operand[op.opcode->results + source].part != Part::dword) op.op_sel &= std::uint8_t(~(1u << source));
  if (op.result_part != Part::dword) op.op_sel &= std::uint8_t(~(1u << sources));
}

void run_dual(Wave& wave, const Op& op) {
  if (op.saved >= 0) {
    std::copy_n(wave.v[op.saved], kMaxLanes, wave.v[kTemporary]);
    wave.v_defined[kTemporary] = wave.v_defined[op.saved];
  }
  for (const Op& part : op.parts) part.run(wave, part);
}

bool reads(const Op& op, int reg) {
  return std::any_of(op.ranges.begin(), op.ranges.end(), [&](const RegisterRange& range) {
    return !range.written && range.kind == Kind::vector && reg >= range.first && reg < range.first + range.count;
  });
}

// Both halves of a dual instruction read before either writes.
Op parse_dual(const Target& target, const std::string& first, const std::string& second, Op op) {
  static const Opcode dual{"v_dual", run_dual, Class::valu, 0, Literal::b32, 0};
  op.opcode = &dual;
  const auto part_name = [](const std::string& text) {
    std::string name = text;
    const auto at = name.find("v_dual_");
    if (at != std::string::npos) name.replace(at, 7, "v_");
    return name;
  };
  op.parts = {parse_instruction(target, part_name(first), op.pc, op.bytes),
              parse_instruction(target, part_name(second), op.pc, op.bytes)};
  for (const Op& part : op.parts) {
    if (!part.run) return refuse(op, part.unsupported);
    op.ranges.insert(op.ranges.end(), part.ranges.begin(), part.ranges.end());
  }
  Op &x = op.parts[0], &y = op.parts[1];
  if (reads(y, x.operand[0].reg)) {
    if (reads(x, y.operand[0].reg)) {
      op.saved = std::int16_t(x.operand[0].reg);
      for (int i = 1; i < y.operands; ++i)
        if (y.operand[i].kind == Kind::vector && y.operand[i].reg == op.saved) y.operand[i].reg = kTemporary;
    } else {
      std::swap(x, y);
    }
  }
  op.run = run_dual;
  return op;
}

}  // namespace

std::string canonical_name(const std::string& mnemonic) {
  std::string name = mnemonic;
  for (const std::string_view suffix : {"_dpp", "_sdwa", "_e32", "_e64"})
    if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0)
      name.resize(name.size() - suffix.size());
  return name;
}

Op parse_instruction(const Target& target, const std::string& text, std::uint64_t pc, std::uint32_t bytes) {
  Op op;
  op.pc = pc;
  op.bytes = bytes;
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string::npos) return refuse(op, "the disassembler does not know these bytes");
  op.text = text.substr(first);
  if (const auto comment = op.text.find("//"); comment != std::string::npos) op.text.resize(comment);
  while (!op.text.empty() && (op.text.back() == ' ' || op.text.back() == '\t')) op.text.pop_back();
  if (const auto joint = op.text.find(" :: "); joint != std::string::npos)
    return parse_dual(target, op.text.substr(0, joint), op.text.substr(joint + 4), op);
  const auto space = op.text.find(' ');
  const std::string mnemonic = op.text.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : op.text.substr(space + 1);
  op.opcode = opcode_table().find(canonical_name(mnemonic));
  if (!op.opcode) return refuse(op, "unknown opcode " + canonical_name(mnemonic));
  if (op.opcode->traits & kNoOperands) {
    if (starts_with(mnemonic, "s_wait") && mnemonic != "s_wait_alu" && mnemonic != "s_waitcnt_depctr" &&
        mnemonic != "s_wait_idle" && !parse_wait(rest, op))
      return refuse(op, "the wait '" + rest + "' is not simulated");
    if (mnemonic == "s_sendmsg" && rest != "sendmsg(MSG_DEALLOC_VGPRS)")
      return refuse(op, "this message is not simulated");
    op.run = op.opcode->run;
    return op;
  }
  if (op.opcode->traits & kPacked) op.op_sel_hi = 0xff;
  if (const std::string why = parse_operands(rest, op); !why.empty()) return refuse(op, why);
  if (op.opcode->name == "v_cndmask_b32" && op.operands == 3)  // dual forms leave VCC unwritten
    parse_operand("vcc_lo", Literal::b32, op.operand[op.operands++]);
  if (op.opcode->operands && op.operands != op.opcode->operands)
    return refuse(
        op, std::to_string(op.operands) + " operands where " + std::to_string(op.opcode->operands) + " are expected");
  const bool is_sdwa = mnemonic.find("_sdwa") != std::string::npos;
  if (is_sdwa && (op.opcode->traits & (kPacked | kAccumulates))) return refuse(op, "this SDWA form is not simulated");
  drop_repeated_selections(op);
  extend_short_constant(mnemonic, op);
  settle_widths(target, op);
  note_ranges(target, op);
  if (op.opcode->kind == Class::branch || op.opcode->kind == Class::barrier)
    op.offset0 = std::int16_t(op.operand[0].bits);
  if (op.opcode->kind == Class::barrier && op.operands == 1 && op.offset0 != -1)
    return refuse(op, "only the workgroup's barrier (-1) is simulated");
  op.run = op.opcode->run;
  return op;
}

}  // namespace gfxsim
