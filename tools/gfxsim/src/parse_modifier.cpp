#include <algorithm>
#include <iterator>
#include <optional>
#include <string>

#include "parse_operand.h"
#include "text.h"

namespace gfxsim {
namespace {

std::uint8_t bits_of(const std::vector<std::int64_t>& list) {
  std::uint8_t bits = 0;
  for (std::size_t i = 0; i < list.size(); ++i) bits |= std::uint8_t((list[i] & 1) << i);
  return bits;
}

bool has(const Op& op, std::uint32_t trait) { return op.opcode->traits & trait; }

bool set_dpp(Op& op, Dpp kind, std::uint32_t control) {
  if (!has(op, kAcceptsDpp)) return false;
  op.dpp = kind;
  op.dpp_control = control;
  return true;
}

// row_shl:1 and its kin; quad_perm:[1,0,3,2].
bool parse_dpp(std::string_view name, std::string_view value, Op& op) {
  const auto number = parse_integer(value);
  const std::pair<std::string_view, Dpp> controls[] = {{"row_shl", Dpp::row_shl},
                                                       {"row_shr", Dpp::row_shr},
                                                       {"row_ror", Dpp::row_ror},
                                                       {"row_mirror", Dpp::row_mirror},
                                                       {"row_half_mirror", Dpp::row_half_mirror},
                                                       {"row_share", Dpp::row_share},
                                                       {"row_xmask", Dpp::row_xmask},
                                                       {"row_newbcast", Dpp::row_newbcast},
                                                       {"wave_shl", Dpp::wave_shl},
                                                       {"wave_shr", Dpp::wave_shr},
                                                       {"wave_rol", Dpp::wave_rol},
                                                       {"wave_ror", Dpp::wave_ror}};
  for (const auto& [control, kind] : controls)
    if (name == control) return set_dpp(op, kind, std::uint32_t(number.value_or(0)));
  if (name == "row_bcast") return set_dpp(op, number == 31 ? Dpp::row_bcast31 : Dpp::row_bcast15, 0);
  if (name == "quad_perm" || name == "dpp8") {
    const auto list = parse_list(value);
    const int bits = name == "dpp8" ? 3 : 2;
    if (list.size() != (bits == 3 ? 8u : 4u)) return false;
    std::uint32_t control = 0;
    for (std::size_t i = 0; i < list.size(); ++i) control |= std::uint32_t(list[i]) << (bits * int(i));
    return set_dpp(op, bits == 3 ? Dpp::dpp8 : Dpp::quad_perm, control);
  }
  if (name == "row_mask") return number ? (op.row_mask = std::uint8_t(*number), true) : false;
  if (name == "bank_mask") return number ? (op.bank_mask = std::uint8_t(*number), true) : false;
  if (name == "bound_ctrl") return op.bound_control = true;
  if (name == "fi") return op.fetch_inactive = true;
  return false;
}

// src0_sel:BYTE_3, dst_unused:UNUSED_PAD and the like.
bool parse_sdwa(std::string_view name, std::string_view value, Op& op) {
  if (name == "dst_unused") {
    op.keeps_rest = value == "UNUSED_PRESERVE";
    return op.keeps_rest || value == "UNUSED_PAD";
  }
  constexpr std::string_view parts[] = {"DWORD", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1"};
  const auto found = std::find(std::begin(parts), std::end(parts), value);
  if (found == std::end(parts)) return false;
  const Part part = Part(found - std::begin(parts));
  if (name == "dst_sel") return op.result_part = part, true;
  const int source = name == "src0_sel" ? 0 : name == "src1_sel" ? 1 : -1;
  const int index = op.opcode->results + source;
  if (source < 0 || index >= op.operands) return false;
  op.operand[index].part = part;
  return true;
}

// How far a memory access is cached or ordered beyond its workgroup: without caches there is nothing to do.
bool is_cache_policy(std::string_view name) {
  for (const std::string_view policy : {"sc0", "sc1", "nt", "glc", "slc", "dlc", "scope", "th"})
    if (name == policy) return true;
  return false;
}

}  // namespace

bool parse_modifier(std::string_view text, Op& op) {
  const auto colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const std::string_view value = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  const bool memory = op.opcode->kind == Class::lds || op.opcode->kind == Class::vmem ||
                      op.opcode->kind == Class::flat || op.opcode->kind == Class::smem ||
                      starts_with(op.opcode->name, "ds_");
  if (memory) {
    if (name == "offset" || name == "offset0" || name == "offset1") {
      const auto number = op.opcode->name == "ds_swizzle_b32" ? parse_swizzle(value) : parse_integer(value);
      if (!number) return false;
      (name == "offset1" ? op.offset1 : op.offset0) = std::int32_t(*number);
      return true;
    }
    if (has(op, kReturnsByModifier) &&
        (name == "sc0" || name == "glc" || (name == "th" && value.find("RETURN") != std::string_view::npos)))
      op.returns_data = true;
    if (name == "offen") return op.offset_enable = true;
    if (name == "idxen") return op.index_enable = true;
    if (name == "lds") return op.to_lds = true;
    return is_cache_policy(name);
  }
  if (name == "clamp") return has(op, kAcceptsClamp) && (op.clamp = true);
  if (name == "bitop3" && op.opcode->name == "v_bitop3_b32") {
    const auto table = parse_integer(value);
    op.offset0 = std::int32_t(table.value_or(0));
    return table.has_value();
  }
  const auto list = parse_list(value);
  if (!list.empty() && has(op, kAcceptsOpSel)) {
    if (name == "op_sel") return op.op_sel = bits_of(list), true;
    if (name == "op_sel_hi") return op.op_sel_hi = bits_of(list), true;
  }
  if (!list.empty() && has(op, kAcceptsNegLoHi)) {
    if (name == "neg_lo") return op.neg_lo = bits_of(list), true;
    if (name == "neg_hi") return op.neg_hi = bits_of(list), true;
  }
  return parse_sdwa(name, value, op) || parse_dpp(name, value, op);
}

}  // namespace gfxsim
