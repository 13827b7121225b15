// Moves, bitwise logic, shifts and byte permutation. Where an instruction only rearranges bits, what is defined in its
// result is followed half by half: packing two 16-bit values reads registers whose other half may never have been
// written.
#include <bit>

#include "opcode_table.h"

namespace gfxsim {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

u32 reverse_bits(u32 x) {
  u32 out = 0;
  for (int i = 0; i < 32; ++i) out = out << 1 | (x >> i & 1);
  return out;
}

u32 permuted_byte(u64 data, u32 selector) {
  selector &= 0xff;
  if (selector >= 13) return 0xff;
  if (selector == 12) return 0;
  if (selector >= 8) return data >> (16 * (selector - 8) + 15) & 1 ? 0xff : 0;
  return u32(data >> (8 * selector)) & 0xff;
}

u32 permute_bytes(u32 high, u32 low, u32 selectors) {
  const u64 data = u64(high) << 32 | low;
  u32 out = 0;
  for (int i = 3; i >= 0; --i) out = out << 8 | permuted_byte(data, selectors >> (8 * i));
  return out;
}

// Which halves of a result are defined, from halves of the sources and constant operands.
struct Defined {
  const Wave& wave;
  const Op& op;
  Halves of(int source) const { return load_defined(wave, op, source); }
  std::uint64_t constant(int source) const { return read_scalar(wave, op.operand[source]); }
  bool is_scalar(int source) const {
    return op.operand[source].kind != Kind::vector && scalar_defined(wave, op.operand[source]);
  }
};

// a & b: a half that is zero in one source is zero, whatever the other.
Halves and_defined(const Defined& d, int a, int b) {
  Halves x = d.of(a), y = d.of(b);
  for (const auto& [scalar, other] : {std::pair{a, &y}, std::pair{b, &x}}) {
    if (!d.is_scalar(scalar)) continue;
    if (!(d.constant(scalar) & 0xffff)) other->lo = ~u64(0);
    if (!(d.constant(scalar) & 0xffff0000u)) other->hi = ~u64(0);
  }
  return {x.lo & y.lo, x.hi & y.hi};
}

// The halves of `value` after a left shift (by 16: the low half moves up and zeros come in).
Halves shifted_left(const Defined& d, int value, int amount) {
  const Halves in = d.of(value);
  const u64 all = d.of(amount).both() & in.both();
  if (!d.is_scalar(amount)) return {all, all};
  const u32 by = d.constant(amount) & 31;
  if (by >= 16) return {~u64(0), in.lo};
  return {in.lo, by ? in.both() : in.hi};
}

Halves shifted_right(const Defined& d, int value, int amount) {
  const Halves in = d.of(value);
  const u64 all = d.of(amount).both() & in.both();
  if (!d.is_scalar(amount)) return {all, all};
  const u32 by = d.constant(amount) & 31;
  if (by >= 16) return {in.hi, ~u64(0)};
  return {by ? in.both() : in.lo, in.hi};
}

template <class F, class DefinedOf>
void rearrange(Wave& wave, const Op& op) {
  using Function = decltype(+F{});
  [&]<class R, class... A>(R (*)(A...)) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      std::tuple<Lanes<A>...> in{load<A>(wave, op, 1 + int(I))...};
      Lanes<R> out;
      for (int i = 0; i < kMaxLanes; ++i) out[i] = F{}(std::get<I>(in)[i]...);
      store(wave, op, 0, out, DefinedOf{}(Defined{wave, op}));
    }(std::index_sequence_for<A...>{});
  }(Function(nullptr));
}

template <class F, class DefinedOf>
void add_rearranging(OpcodeTable& t, Names names, F, DefinedOf) {
  constexpr auto operands = std::uint8_t(1 + Signature<decltype(+F{})>::sources);
  t.add(names, {"", rearrange<F, DefinedOf>, Class::valu, 1, Literal::b32, kAcceptsDpp, 0, operands});
}

Halves both(Halves a, Halves b) { return {a.lo & b.lo, a.hi & b.hi}; }

Halves permuted_defined(const Defined& d) {
  const Halves high = d.of(1), low = d.of(2);
  const u64 everything = high.both() & low.both() & d.of(3).both();
  if (!d.is_scalar(3)) return {everything, everything};
  u64 lanes[2] = {~u64(0), ~u64(0)};
  for (int i = 0; i < 4; ++i) {
    const u32 selector = d.constant(3) >> (8 * i) & 0xff;
    if (selector >= 12) continue;
    const int half = selector < 8 ? selector / 2 : selector - 8;
    lanes[i / 2] &= half == 0 ? low.lo : half == 1 ? low.hi : half == 2 ? high.lo : high.hi;
  }
  return {lanes[0], lanes[1]};
}

void add_logic(OpcodeTable& t) {
  t.vector_by_halves({"v_mov_b32", "v_accvgpr_write_b32", "v_accvgpr_read_b32", "v_accvgpr_mov_b32"},
                     [](u32 a) { return a; });
  t.vector_upward({"v_mov_b64"}, [](u64 a) { return a; });
  t.vector_by_halves({"v_not_b32"}, [](u32 a) { return ~a; });
  t.vector_by_halves({"v_or_b32"}, [](u32 a, u32 b) { return a | b; });
  t.vector_by_halves({"v_xor_b32"}, [](u32 a, u32 b) { return a ^ b; });
  t.vector_by_halves({"v_xnor_b32"}, [](u32 a, u32 b) { return ~(a ^ b); });
  t.vector_by_halves({"v_or3_b32"}, [](u32 a, u32 b, u32 c) { return a | b | c; });
  t.vector_by_halves({"v_xor3_b32"}, [](u32 a, u32 b, u32 c) { return a ^ b ^ c; });
  t.vector_by_halves({"v_bfi_b32"}, [](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); });
  add_rearranging(t, {"v_and_b32"}, [](u32 a, u32 b) { return a & b; }, [](Defined d) { return and_defined(d, 1, 2); });
  add_rearranging(
      t, {"v_and_or_b32"}, [](u32 a, u32 b, u32 c) { return (a & b) | c; },
      [](Defined d) { return both(and_defined(d, 1, 2), d.of(3)); });
  t.vector({"v_mov_b16"}, [](u16 a) { return a; });
  t.vector({"v_not_b16"}, [](u16 a) { return u16(~a); });
  t.vector({"v_xor_b16"}, [](u16 a, u16 b) { return u16(a ^ b); });
  t.vector({"v_and_b16"}, [](u16 a, u16 b) { return u16(a & b); });
  t.vector({"v_or_b16"}, [](u16 a, u16 b) { return u16(a | b); });
}

void add_shifts(OpcodeTable& t) {
  add_rearranging(
      t, {"v_lshlrev_b32"}, [](u32 by, u32 a) { return a << (by & 31); },
      [](Defined d) { return shifted_left(d, 2, 1); });
  add_rearranging(
      t, {"v_lshrrev_b32"}, [](u32 by, u32 a) { return a >> (by & 31); },
      [](Defined d) { return shifted_right(d, 2, 1); });
  add_rearranging(
      t, {"v_lshl_or_b32"}, [](u32 a, u32 by, u32 c) { return a << (by & 31) | c; },
      [](Defined d) { return both(shifted_left(d, 1, 2), d.of(3)); });
  t.vector({"v_ashrrev_i32"}, [](u32 by, i32 a) { return a >> (by & 31); });
  t.vector_upward({"v_lshlrev_b64"}, [](u32 by, u64 a) { return a << (by & 63); });
  t.vector({"v_lshrrev_b64"}, [](u32 by, u64 a) { return a >> (by & 63); });
  t.vector({"v_ashrrev_i64"}, [](u32 by, i64 a) { return a >> (by & 63); });
  t.vector({"v_lshlrev_b16"}, [](u16 by, u16 a) { return u16(a << (by & 15)); });
  t.vector({"v_lshrrev_b16"}, [](u16 by, u16 a) { return u16(a >> (by & 15)); });
  t.vector({"v_ashrrev_i16"}, [](u16 by, i16 a) { return i16(a >> (by & 15)); });
  t.vector({"v_alignbit_b32"}, [](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (c & 31)); });
  t.vector({"v_alignbyte_b32"}, [](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (8 * (c & 3))); });
}

void add_fields(OpcodeTable& t) {
  t.vector({"v_bfe_u32"}, [](u32 a, u32 at, u32 n) { return a >> (at & 31) & ((1u << (n & 31)) - 1); });
  t.vector({"v_bfe_i32"}, [](u32 a, u32 at, u32 n) {
    const u32 width = n & 31, sign = 1u << ((width - 1) & 31);
    const u32 field = u32(i32(a) >> (at & 31)) & ((1u << width) - 1);
    return width ? (field ^ sign) - sign : 0u;
  });
  t.vector({"v_bfm_b32"}, [](u32 n, u32 at) { return ((1u << (n & 31)) - 1) << (at & 31); });
  t.vector({"v_bfrev_b32"}, [](u32 a) { return reverse_bits(a); });
  t.vector({"v_bcnt_u32_b32"}, [](u32 a, u32 b) { return u32(std::popcount(a)) + b; });
  t.vector({"v_ffbh_u32", "v_clz_i32_u32"}, [](u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
  t.vector({"v_ffbl_b32", "v_ctz_i32_b32"}, [](u32 a) { return a ? u32(std::countr_zero(a)) : ~0u; });
  add_rearranging(
      t, {"v_perm_b32"}, [](u32 a, u32 b, u32 c) { return permute_bytes(a, b, c); },
      [](Defined d) { return permuted_defined(d); });
}

// The truth table of three inputs where input `source` (0: the table's highest bit) is `value`.
u32 cofactor(u32 table, int source, bool value) {
  const int step = 4 >> source;
  u32 out = 0;
  for (int i = 0; i < 8; ++i) out |= (table >> (value ? i | step : i & ~step) & 1) << i;
  return out;
}

// A half of the result depends on a source only where the table does, once constants of all zeros or ones are put in.
u64 defined_by_table(const Defined& d, u32 table, bool high) {
  for (int source = 0; source < 3; ++source) {
    if (!d.is_scalar(source + 1)) continue;
    const u32 half = d.constant(source + 1) >> (high ? 16 : 0) & 0xffff;
    if (half == 0 || half == 0xffff) table = cofactor(table, source, half != 0);
  }
  u64 lanes = ~u64(0);
  for (int source = 0; source < 3; ++source)
    if (cofactor(table, source, false) != cofactor(table, source, true))
      lanes &= high ? d.of(source + 1).hi : d.of(source + 1).lo;
  return lanes;
}

void run_bitop3(Wave& wave, const Op& op) {
  const auto a = load<u32>(wave, op, 1), b = load<u32>(wave, op, 2), c = load<u32>(wave, op, 3);
  const u32 table = u32(op.offset0);
  Lanes<u32> out;
  for (int i = 0; i < kMaxLanes; ++i) {
    out[i] = 0;
    for (int inputs = 0; inputs < 8; ++inputs)
      if (table >> inputs & 1)
        out[i] |= (inputs & 4 ? a[i] : ~a[i]) & (inputs & 2 ? b[i] : ~b[i]) & (inputs & 1 ? c[i] : ~c[i]);
  }
  const Defined d{wave, op};
  store(wave, op, 0, out, {defined_by_table(d, table, false), defined_by_table(d, table, true)});
}

void run_pack(Wave& wave, const Op& op) {
  const bool a_high = op.op_sel & 1, b_high = op.op_sel >> 1 & 1;
  const auto a = load<u16>(wave, op, 1, a_high), b = load<u16>(wave, op, 2, b_high);
  Lanes<u32> out;
  for (int i = 0; i < kMaxLanes; ++i) out[i] = a[i] | u32(b[i]) << 16;
  store(wave, op, 0, out, {value_defined<u16>(wave, op, 1, a_high), value_defined<u16>(wave, op, 2, b_high)});
}

}  // namespace

void add_bits(OpcodeTable& t) {
  add_logic(t);
  add_shifts(t);
  add_fields(t);
  t.add({"v_bitop3_b32"}, {"", run_bitop3, Class::valu, 1, Literal::b32, 0, 0, 4});
  t.add({"v_pack_b32_f16"}, {"", run_pack, Class::valu, 1, Literal::f16, kAcceptsOpSel, 0, 3});
}

}  // namespace gfxsim
