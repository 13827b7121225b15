// Vector comparisons: one bit per active lane into a lane mask, zero for the others; v_cmpx writes EXEC.
#include <string>

#include "opcode_table.h"

namespace gfxsim {
namespace {

using u64 = std::uint64_t;

template <class T, class Compare>
void run_compare(Wave& wave, const Op& op) {
  const int first = op.opcode->results;
  const auto convert = [](T x) {
    if constexpr (std::is_same_v<T, Half>) {
      return to_float(x);
    } else {
      return x;
    }
  };
  const auto a = load<T>(wave, op, first, selects_high(op, 0)), b = load<T>(wave, op, first + 1, selects_high(op, 1));
  u64 mask = 0;
  for (int i = 0; i < kMaxLanes; ++i) mask |= u64(Compare{}(convert(a[i]), convert(b[i]))) << i;
  const u64 exec = wave.exec();
  const u64 defined = value_defined<T>(wave, op, first, selects_high(op, 0)) &
                      value_defined<T>(wave, op, first + 1, selects_high(op, 1));
  Operand result = op.operand[0];
  if (first == 0) {
    result = {};
    result.kind = Kind::scalar;
    result.reg = kExec;
  }
  write_mask(wave, op, result, mask & exec, defined | ~exec);
}

// Bits of the class mask, from bit 0: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal,
// +inf.
int class_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return bits & 0x400000 ? 1 : 0;
  const int distance = magnitude == 0 ? 0 : magnitude < 0x800000 ? 1 : magnitude < 0x7f800000 ? 2 : 3;
  return bits >> 31 ? 5 - distance : 6 + distance;
}

void run_class(Wave& wave, const Op& op) {
  const auto x = load<float>(wave, op, 1);
  const auto classes = load<std::uint32_t>(wave, op, 2);
  u64 mask = 0;
  for (int i = 0; i < kMaxLanes; ++i) mask |= u64(classes[i] >> class_of(x[i]) & 1) << i;
  const u64 exec = wave.exec();
  const u64 defined = value_defined<float>(wave, op, 1) & value_defined<std::uint32_t>(wave, op, 2);
  write_mask(wave, op, op.operand[0], mask & exec, defined | ~exec);
}

template <class T, class Compare>
void add_one(OpcodeTable& t, const std::string& name) {
  const Literal literal = std::is_same_v<T, Half> ? Literal::f16 : sizeof(T) == 8 ? Literal::b64 : Literal::b32;
  const std::uint32_t traits = sizeof(T) == 2 ? std::uint32_t(kAcceptsOpSel) : 0;
  t.add({("v_cmp_" + name).c_str()}, {"", run_compare<T, Compare>, Class::valu, 1, literal, traits, 0, 3});
  t.add({("v_cmpx_" + name).c_str()}, {"", run_compare<T, Compare>, Class::valu, 0, literal, traits, 0, 2});
}

struct Unordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b;
  }
};
template <class Compare>
struct Not {
  template <class T>
  bool operator()(T a, T b) const {
    return !Compare{}(a, b);
  }
};
struct LessOrGreater {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};

template <class T>
void add_common(OpcodeTable& t, const std::string& type) {
  add_one<T, std::less<>>(t, "lt_" + type);
  add_one<T, std::equal_to<>>(t, "eq_" + type);
  add_one<T, std::less_equal<>>(t, "le_" + type);
  add_one<T, std::greater<>>(t, "gt_" + type);
  add_one<T, std::greater_equal<>>(t, "ge_" + type);
}

template <class T>
void add_float_compare(OpcodeTable& t, const std::string& type) {
  add_common<T>(t, type);
  add_one<T, LessOrGreater>(t, "lg_" + type);
  add_one<T, Unordered>(t, "u_" + type);
  add_one<T, Not<Unordered>>(t, "o_" + type);
  add_one<T, Not<std::less<>>>(t, "nlt_" + type);
  add_one<T, Not<std::equal_to<>>>(t, "neq_" + type);
  add_one<T, Not<std::less_equal<>>>(t, "nle_" + type);
  add_one<T, Not<std::greater<>>>(t, "ngt_" + type);
  add_one<T, Not<std::greater_equal<>>>(t, "nge_" + type);
  add_one<T, Not<LessOrGreater>>(t, "nlg_" + type);
}

template <class T>
void add_integer_compare(OpcodeTable& t, const std::string& type) {
  add_common<T>(t, type);
  add_one<T, std::not_equal_to<>>(t, "ne_" + type);
}

}  // namespace

void add_compare(OpcodeTable& t) {
  add_float_compare<float>(t, "f32");
  add_float_compare<Half>(t, "f16");
  add_integer_compare<std::int32_t>(t, "i32");
  add_integer_compare<std::uint32_t>(t, "u32");
  add_integer_compare<std::int64_t>(t, "i64");
  add_integer_compare<std::uint64_t>(t, "u64");
  add_integer_compare<std::int16_t>(t, "i16");
  add_integer_compare<std::uint16_t>(t, "u16");
  t.add({"v_cmp_class_f32"}, {"", run_class, Class::valu, 1, Literal::b32, 0, 0, 3});
}

}  // namespace gfxsim
