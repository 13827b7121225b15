// Packed arithmetic (VOP3P): two halves or two floats per lane. op_sel and op_sel_hi choose which element of each
// source feeds the low and the high result, neg_lo and neg_hi flip its sign.
#include "opcode_table.h"

namespace gfxsim {
namespace {

using u16 = std::uint16_t;
using i16 = std::int16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Element `high` of a packed source: 16 bits of a register, or one of two registers.
template <class T>
Lanes<T> load_element(const Wave& wave, const Op& op, int index, bool high, bool negate, u64& defined) {
  Lanes<T> out;
  if constexpr (sizeof(T) == 2) {
    out = load<T>(wave, op, index, high);
    defined &= value_defined<T>(wave, op, index, high);
  } else {
    Operand operand = op.operand[index];
    if (operand.kind != Kind::constant) operand.reg = std::uint16_t(operand.reg + high);
    operand.dwords = 1;
    out = load_operand<T>(wave, operand);
    defined &= operand_defined(wave, operand).both();
  }
  if (negate) {
    constexpr auto sign = Bits<T>(Bits<T>(1) << (sizeof(T) * 8 - 1));
    for (int i = 0; i < kMaxLanes; ++i) out[i] = std::bit_cast<T>(Bits<T>(std::bit_cast<Bits<T>>(out[i]) ^ sign));
  }
  return out;
}

template <class F, class R, class... A, std::size_t... I>
Lanes<R> packed_half(const Wave& wave, const Op& op, bool high, u64& defined, R (*)(A...), std::index_sequence<I...>) {
  const std::uint8_t select = high ? op.op_sel_hi : op.op_sel, negate = high ? op.neg_hi : op.neg_lo;
  std::tuple<Lanes<A>...> in{
      load_element<A>(wave, op, source_index(op, I, sizeof...(A)), select >> I & 1, negate >> I & 1, defined)...};
  Lanes<R> out;
  for (int i = 0; i < kMaxLanes; ++i) out[i] = F{}(std::get<I>(in)[i]...);
  return out;
}

template <class F>
void run_packed(Wave& wave, const Op& op) {
  using Function = decltype(+F{});
  [&]<class R, class... A>(R (*f)(A...)) {
    u64 defined[2] = {~u64(0), ~u64(0)};
    const auto low = packed_half<F>(wave, op, false, defined[0], f, std::index_sequence_for<A...>{});
    const auto high = packed_half<F>(wave, op, true, defined[1], f, std::index_sequence_for<A...>{});
    if constexpr (sizeof(R) == 2) {
      Lanes<u32> out;
      for (int i = 0; i < kMaxLanes; ++i) out[i] = u32(to_bits(low[i])) | u32(to_bits(high[i])) << 16;
      store(wave, op, 0, out, {defined[0], defined[1]});
    } else {
      const u64 lanes = written_lanes(wave, op);
      const auto write = [&](int reg, const Lanes<R>& value, u64 known) {
        Lanes<u32> bits;
        for (int i = 0; i < kMaxLanes; ++i) bits[i] = u32(to_bits(value[i]));
        store_bits(wave, reg, bits.lane, lanes);
        store_defined(wave, reg, {known, known}, lanes);
      };
      write(op.operand[0].reg, low, defined[0]);
      write(op.operand[0].reg + 1, high, defined[1]);
    }
  }(Function(nullptr));
}

template <class F>
void add_pair(OpcodeTable& t, Names names, F) {
  using S = Signature<decltype(+F{})>;
  t.add(names, {"", run_packed<F>, Class::valu, 1, literal_of<F>(), kPacked | kAcceptsOpSel | kAcceptsNegLoHi, 0,
                std::uint8_t(1 + S::sources)});
}

// A source of a mixed-precision fma: a float, or by op_sel_hi a half chosen by op_sel. neg_hi takes the absolute value.
Lanes<float> load_mixed(const Wave& wave, const Op& op, int source, u64& defined) {
  const bool half = op.op_sel_hi >> source & 1, high = op.op_sel >> source & 1;
  Lanes<float> out;
  if (half) {
    const auto in = load<Half>(wave, op, 1 + source, high);
    for (int i = 0; i < kMaxLanes; ++i) out[i] = to_float(in[i]);
    defined &= value_defined<Half>(wave, op, 1 + source, high);
  } else {
    out = load<float>(wave, op, 1 + source);
    defined &= value_defined<float>(wave, op, 1 + source);
  }
  return out;
}

// The low result is an element of the first source, the high result one of the second; op_sel chooses both.
void run_pk_mov(Wave& wave, const Op& op) {
  u64 defined[2] = {~u64(0), ~u64(0)};
  const Lanes<u32> value[2] = {load_element<u32>(wave, op, 1, op.op_sel & 1, false, defined[0]),
                               load_element<u32>(wave, op, 2, op.op_sel >> 1 & 1, false, defined[1])};
  const u64 lanes = written_lanes(wave, op);
  for (int half = 0; half < 2; ++half) {
    store_bits(wave, op.operand[0].reg + half, value[half].lane, lanes);
    store_defined(wave, op.operand[0].reg + half, {defined[half], defined[half]}, lanes);
  }
}

enum class Mix { f32, low_half, high_half };

template <Mix kMix>
void run_mix(Wave& wave, const Op& op) {
  u64 defined = ~u64(0);
  const auto a = load_mixed(wave, op, 0, defined), b = load_mixed(wave, op, 1, defined),
             c = load_mixed(wave, op, 2, defined);
  Lanes<float> sum;
  for (int i = 0; i < kMaxLanes; ++i) sum[i] = std::fma(a[i], b[i], c[i]);
  if constexpr (kMix == Mix::f32) {
    store(wave, op, 0, sum, {defined, defined});
  } else {
    Lanes<Half> out;
    for (int i = 0; i < kMaxLanes; ++i) out[i] = to_half(double(sum[i]));
    store(wave, op, 0, out, {defined, defined}, kMix == Mix::high_half);
  }
}

float max_num(float a, float b) { return a != a ? b : b != b || a > b || (a == b && !std::signbit(a)) ? a : b; }
float min_num(float a, float b) { return a != a ? b : b != b || a < b || (a == b && std::signbit(a)) ? a : b; }

}  // namespace

void add_packed(OpcodeTable& t) {
  add_pair(t, {"v_pk_add_f16"}, [](Half a, Half b) { return to_half(to_float(a) + to_float(b)); });
  add_pair(t, {"v_pk_mul_f16"}, [](Half a, Half b) { return to_half(to_float(a) * to_float(b)); });
  add_pair(t, {"v_pk_fma_f16"}, [](Half a, Half b, Half c) { return half_fma(a, b, c); });
  add_pair(t, {"v_pk_max_f16", "v_pk_max_num_f16"},
           [](Half a, Half b) { return to_half(max_num(to_float(a), to_float(b))); });
  add_pair(t, {"v_pk_min_f16", "v_pk_min_num_f16"},
           [](Half a, Half b) { return to_half(min_num(to_float(a), to_float(b))); });
  add_pair(t, {"v_pk_add_f32"}, [](float a, float b) { return a + b; });
  add_pair(t, {"v_pk_mul_f32"}, [](float a, float b) { return a * b; });
  add_pair(t, {"v_pk_fma_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); });
  add_pair(t, {"v_pk_add_u16"}, [](u16 a, u16 b) { return u16(a + b); });
  add_pair(t, {"v_pk_sub_u16", "v_pk_sub_i16"}, [](u16 a, u16 b) { return u16(a - b); });
  add_pair(t, {"v_pk_mul_lo_u16"}, [](u16 a, u16 b) { return u16(a * b); });
  add_pair(t, {"v_pk_lshlrev_b16"}, [](u16 by, u16 a) { return u16(a << (by & 15)); });
  add_pair(t, {"v_pk_lshrrev_b16"}, [](u16 by, u16 a) { return u16(a >> (by & 15)); });
  t.add({"v_pk_mov_b32"}, {"", run_pk_mov, Class::valu, 1, Literal::b32, kPacked | kAcceptsOpSel, 0, 3});
  const std::uint32_t mixed = kAcceptsOpSel;
  t.add({"v_fma_mix_f32", "v_mad_mix_f32"}, {"", run_mix<Mix::f32>, Class::valu, 1, Literal::b32, mixed, 0, 4});
  t.add({"v_fma_mixlo_f16"}, {"", run_mix<Mix::low_half>, Class::valu, 1, Literal::b32, mixed | kReadsResult, 0, 4});
  t.add({"v_fma_mixhi_f16"}, {"", run_mix<Mix::high_half>, Class::valu, 1, Literal::b32, mixed | kReadsResult, 0, 4});
}

}  // namespace gfxsim
