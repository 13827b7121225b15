// The opcodes that can be executed, by canonical name (encoding suffixes such as _e32 removed).
//
// A vector instruction is a lambda over one lane: its parameter types say how sources are read (float, Half, uint32_t,
// double, ...), its result type how the result is written.
#pragma once

#include <initializer_list>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "lanes.h"

namespace gfxsim {

template <class F>
struct Signature;
template <class R, class... A>
struct Signature<R (*)(A...)> {
  using Result = R;
  static constexpr int sources = sizeof...(A);
  static constexpr bool has_half = (std::is_same_v<A, Half> || ...);
  static constexpr bool has_double = (std::is_same_v<A, double> || ...);
  static constexpr bool has_64 = ((sizeof(A) == 8) || ...);
};

inline int source_index(const Op& op, std::size_t source, std::size_t sources) {
  const bool accumulator = (op.opcode->traits & kAccumulates) && source + 1 == sources;
  return accumulator ? 0 : op.opcode->results + int(source);
}

inline bool selects_high(const Op& op, std::size_t source) {
  return !(op.opcode->traits & kPacked) && (op.op_sel >> source & 1);
}

// Which bits of the sources the definedness of a result depends on.
enum class Spread {
  whole,   // every bit of the result on every bit of the sources
  halves,  // each half only on the same halves (and, or, xor, moves)
  upward,  // 64 bits: the low word only on low words (sums, left shifts)
};

template <class F, Spread kSpread, class R, class... A, std::size_t... I>
void run_lanes(Wave& wave, const Op& op, R (*)(A...), std::index_sequence<I...>) {
  constexpr std::size_t sources = sizeof...(A);
  std::tuple<Lanes<A>...> in{load<A>(wave, op, source_index(op, I, sources), selects_high(op, I))...};
  Lanes<R> out;
  for (int i = 0; i < kMaxLanes; ++i) out[i] = F{}(std::get<I>(in)[i]...);
  Halves defined;
  if constexpr (kSpread == Spread::halves) {
    defined.lo = (load_defined(wave, op, source_index(op, I, sources)).lo & ...);
    defined.hi = (load_defined(wave, op, source_index(op, I, sources)).hi & ...);
  } else {
    defined.lo = (value_defined<A>(wave, op, source_index(op, I, sources), selects_high(op, I)) & ...);
    defined.hi = defined.lo;
  }
  [[maybe_unused]] const std::uint64_t low = (low_word_defined(wave, op.operand[source_index(op, I, sources)]) & ...);
  store(wave, op, 0, out, defined, sizeof(R) == 2 && selects_high(op, sources));
  if constexpr (kSpread == Spread::upward) store_defined(wave, op.operand[0].reg, {low, low}, written_lanes(wave, op));
}

template <class F, Spread kSpread = Spread::whole>
void vector_instruction(Wave& wave, const Op& op) {
  using Function = decltype(+F{});
  [&]<class R, class... A>(R (*f)(A...)) {
    run_lanes<F, kSpread>(wave, op, f, std::index_sequence_for<A...>{});
  }(Function(nullptr));
}

template <class F>
Literal literal_of() {
  using S = Signature<decltype(+F{})>;
  return S::has_half ? Literal::f16 : S::has_double ? Literal::f64 : S::has_64 ? Literal::b64 : Literal::b32;
}

using Names = std::initializer_list<const char*>;

class OpcodeTable {
 public:
  OpcodeTable();
  const Opcode* find(std::string_view name) const;
  const std::map<std::string, Opcode, std::less<>>& all() const { return opcodes_; }

  // Several names: the same instruction, renamed between targets. Unit checks of the first hold for all.
  void add(Names names, Opcode opcode);

  // One result per lane from the sources of that lane.
  template <class F>
  void vector(Names names, F, std::uint32_t traits = 0, Class kind = Class::valu) {
    add_vector<F>(names, &vector_instruction<F>, traits, kind);
  }
  // The same where each half of the result depends only on the same halves of the sources (and, or, xor, moves).
  template <class F>
  void vector_by_halves(Names names, F, std::uint32_t traits = 0) {
    add_vector<F>(names, &vector_instruction<F, Spread::halves>, traits, Class::valu);
  }
  // The same with a 64-bit result whose low word depends only on low words.
  template <class F>
  void vector_upward(Names names, F) {
    add_vector<F>(names, &vector_instruction<F, Spread::upward>, 0, Class::valu);
  }

 private:
  template <class F>
  void add_vector(Names names, Handler run, std::uint32_t traits, Class kind) {
    using S = Signature<decltype(+F{})>;
    if constexpr (std::is_same_v<typename S::Result, float>) traits |= kAcceptsClamp;
    if constexpr (S::has_half || sizeof(typename S::Result) == 2) traits |= kAcceptsOpSel;
    if constexpr (!S::has_64) traits |= kAcceptsDpp;
    const int accumulator = traits & kAccumulates ? 1 : 0;
    add(names, {"", run, kind, 1, literal_of<F>(), traits, 0, std::uint8_t(1 + S::sources - accumulator)});
  }
  std::map<std::string, Opcode, std::less<>> opcodes_;
};

const OpcodeTable& opcode_table();

void add_scalar(OpcodeTable& table);
void add_scalar_float(OpcodeTable& table);
void add_control(OpcodeTable& table);
void add_waits(OpcodeTable& table);
void add_float(OpcodeTable& table);
void add_transcendental(OpcodeTable& table);
void add_integer(OpcodeTable& table);
void add_bits(OpcodeTable& table);
void add_carry(OpcodeTable& table);
void add_compare(OpcodeTable& table);
void add_convert(OpcodeTable& table);
void add_packed(OpcodeTable& table);
void add_cross_lane(OpcodeTable& table);
void add_lds(OpcodeTable& table);
void add_global(OpcodeTable& table);
void add_scalar_memory(OpcodeTable& table);
void add_matrix(OpcodeTable& table);

}  // namespace gfxsim
