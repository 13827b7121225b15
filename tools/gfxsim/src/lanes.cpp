#include "lanes.h"

#include <algorithm>

namespace gfxsim {
namespace {

// Rows have 16 lanes. A source outside its row (or wave) is -1.
int dpp_source(const Op& op, int lane, int lanes) {
  const int row = lane & ~15, within = lane & 15, by = int(op.dpp_control);
  const auto in_row = [&](int at) { return at >= 0 && at < 16 ? row + at : -1; };
  switch (op.dpp) {
    case Dpp::quad_perm: return (lane & ~3) | int(op.dpp_control >> (2 * (lane & 3)) & 3);
    case Dpp::dpp8: return (lane & ~7) | int(op.dpp_control >> (3 * (lane & 7)) & 7);
    case Dpp::row_shl: return in_row(within + by);
    case Dpp::row_shr: return in_row(within - by);
    case Dpp::row_ror: return row + ((within - by) & 15);
    case Dpp::row_mirror: return row + 15 - within;
    case Dpp::row_half_mirror: return (lane & ~7) + 7 - (lane & 7);
    case Dpp::row_share:
    case Dpp::row_newbcast: return row + by;
    case Dpp::row_xmask: return row + (within ^ by);
    case Dpp::row_bcast15: return row >= 16 ? row - 1 : -1;
    case Dpp::row_bcast31: return lane >= 32 ? 31 : -1;
    case Dpp::wave_shl: return lane + 1 < lanes ? lane + 1 : -1;
    case Dpp::wave_shr: return lane - 1;
    case Dpp::wave_rol: return (lane + 1) % lanes;
    case Dpp::wave_ror: return (lane + lanes - 1) % lanes;
    case Dpp::none: break;
  }
  return lane;
}

}  // namespace

void dpp_sources(const Wave& wave, const Op& op, int (&source)[kMaxLanes]) {
  const std::uint64_t exec = wave.exec();
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    const int from = lane < wave.lanes ? dpp_source(op, lane, wave.lanes) : -1;
    source[lane] = from >= 0 && (op.fetch_inactive || (exec >> from & 1)) ? from : -1;
  }
}

void permute_dpp(const Wave& wave, const Op& op, Lanes<std::uint32_t>& value) {
  int source[kMaxLanes];
  dpp_sources(wave, op, source);
  const Lanes<std::uint32_t> in = value;
  for (int i = 0; i < kMaxLanes; ++i) value[i] = source[i] < 0 ? 0 : in[source[i]];
}

std::uint64_t written_lanes(const Wave& wave, const Op& op) {
  std::uint64_t lanes = wave.exec();
  if (op.dpp == Dpp::none) return lanes;
  int source[kMaxLanes];
  dpp_sources(wave, op, source);
  for (int lane = 0; lane < wave.lanes; ++lane) {
    const bool enabled = (op.row_mask >> (lane / 16) & 1) && (op.bank_mask >> (lane / 4 % 4) & 1);
    if (!enabled || (source[lane] < 0 && !op.bound_control)) lanes &= ~(std::uint64_t(1) << lane);
  }
  return lanes;
}

Halves operand_defined(const Wave& wave, const Operand& operand) {
  const std::uint64_t all = ~std::uint64_t(0);
  if (operand.part != Part::dword) {
    Operand whole = operand;
    whole.part = Part::dword;
    const Halves halves = operand_defined(wave, whole);
    const std::uint64_t known = part_shift(operand.part) < 16 ? halves.lo : halves.hi;
    return {known, operand.sign_extend ? known : all};
  }
  if (operand.kind == Kind::vector) {
    Halves halves = wave.v_defined[operand.reg];
    for (int i = 1; i < operand.dwords; ++i) {
      halves.lo &= wave.v_defined[operand.reg + i].lo;
      halves.hi &= wave.v_defined[operand.reg + i].hi;
    }
    return halves;
  }
  if (operand.kind == Kind::scalar && operand.dwords == 1) {
    const std::uint32_t known = wave.s_defined[operand.reg];
    return {(known & 0xffff) == 0xffff ? all : 0, known >> 16 == 0xffff ? all : 0};
  }
  const std::uint64_t known = scalar_defined(wave, operand) ? all : 0;
  return {known, known};
}

std::uint64_t low_word_defined(const Wave& wave, const Operand& operand) {
  Operand low = operand;
  low.dwords = 1;
  return operand_defined(wave, low).both();
}

Halves load_defined(const Wave& wave, const Op& op, int index) {
  const Halves halves = operand_defined(wave, op.operand[index]);
  if (op.dpp == Dpp::none || index != op.opcode->results) return halves;
  int source[kMaxLanes];
  dpp_sources(wave, op, source);
  Halves moved;
  for (int i = 0; i < kMaxLanes; ++i) {
    moved.lo |= (source[i] < 0 ? 1 : halves.lo >> source[i] & 1) << i;
    moved.hi |= (source[i] < 0 ? 1 : halves.hi >> source[i] & 1) << i;
  }
  return moved;
}

void place_part(const Wave& wave, const Op& op, int reg, Lanes<std::uint32_t>& bits, Halves& defined) {
  const int shift = part_shift(op.result_part);
  const std::uint32_t mask = ((1u << part_bits(op.result_part)) - 1) << shift;
  for (int i = 0; i < kMaxLanes; ++i)
    bits[i] = (bits[i] << shift & mask) | (op.keeps_rest ? wave.v[reg][i] & ~mask : 0);
  const std::uint64_t all = ~std::uint64_t(0), value = defined.lo;
  defined = op.keeps_rest ? wave.v_defined[reg] : Halves{all, all};
  (shift < 16 ? defined.lo : defined.hi) =
      value & (part_bits(op.result_part) == 8 ? (shift < 16 ? defined.lo : defined.hi) : all);
}

void store_bits(Wave& wave, int reg, const std::uint32_t* value, std::uint64_t lanes) {
  std::uint32_t* out = wave.v[reg];
  if (lanes == ~std::uint64_t(0)) {
    std::copy_n(value, kMaxLanes, out);
    return;
  }
  for (int i = 0; i < kMaxLanes; ++i) out[i] = lanes >> i & 1 ? value[i] : out[i];
}

void store_defined(Wave& wave, int reg, Halves defined, std::uint64_t lanes) {
  Halves& known = wave.v_defined[reg];
  known.lo = (known.lo & ~lanes) | (defined.lo & lanes);
  known.hi = (known.hi & ~lanes) | (defined.hi & lanes);
}

}  // namespace gfxsim
