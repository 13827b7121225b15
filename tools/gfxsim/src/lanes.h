// Vector operands as arrays over lanes, with the input and output modifiers applied. All 64 lanes are computed,
// whatever the wave size and EXEC; only active lanes are stored.
#pragma once

#include <cmath>
#include <type_traits>

#include "half.h"
#include "wave.h"

namespace gfxsim {

template <class T>
struct alignas(64) Lanes {
  T lane[kMaxLanes];
  T& operator[](int i) { return lane[i]; }
  const T& operator[](int i) const { return lane[i]; }
};

// Source lane of every lane under a DPP control; -1 where there is none.
void dpp_sources(const Wave& wave, const Op& op, int (&source)[kMaxLanes]);

// Lanes that a vector instruction writes: EXEC, less those that DPP leaves out.
std::uint64_t written_lanes(const Wave& wave, const Op& op);

template <class T>
T from_bits(std::uint64_t bits) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<T>(bits);
  if constexpr (sizeof(T) == 4) return std::bit_cast<T>(std::uint32_t(bits));
  if constexpr (sizeof(T) == 2) return std::bit_cast<T>(std::uint16_t(bits));
}

template <class T>
std::uint64_t to_bits(T value) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<std::uint64_t>(value);
  if constexpr (sizeof(T) == 4) return std::bit_cast<std::uint32_t>(value);
  if constexpr (sizeof(T) == 2) return std::bit_cast<std::uint16_t>(value);
}

template <class T>
using Bits =
    std::conditional_t<sizeof(T) == 8, std::uint64_t, std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;

// Moves values to the lanes that DPP gives them to; 0 where there is no source.
void permute_dpp(const Wave& wave, const Op& op, Lanes<std::uint32_t>& value);

template <class T>
void input_modifiers(const Operand& operand, Lanes<T>& value) {
  if (!operand.absolute && !operand.negate) return;
  constexpr Bits<T> sign = Bits<T>(Bits<T>(1) << (sizeof(T) * 8 - 1));
  const Bits<T> keep = operand.absolute ? Bits<T>(~sign) : Bits<T>(~Bits<T>(0));
  const Bits<T> flip = operand.negate ? sign : Bits<T>(0);
  for (int i = 0; i < kMaxLanes; ++i)
    value[i] = std::bit_cast<T>(Bits<T>((std::bit_cast<Bits<T>>(value[i]) & keep) ^ flip));
}

inline std::uint32_t take_part(const Operand& operand, std::uint32_t bits) {
  const int unused = 32 - part_bits(operand.part);
  const std::uint32_t top = bits << (unused - part_shift(operand.part));
  return operand.sign_extend ? std::uint32_t(std::int32_t(top) >> unused) : top >> unused;
}

// The value of an operand in every lane. 16-bit values come from the low half of a register, or from the high one.
// `dpp` (may be null) is the instruction whose DPP control permutes the lanes.
template <class T>
Lanes<T> load_operand(const Wave& wave, const Operand& operand, bool high = false, const Op* dpp = nullptr) {
  Lanes<T> out;
  if (operand.kind != Kind::vector) {
    std::uint64_t bits = read_scalar(wave, operand);
    if (operand.part != Part::dword) bits = take_part(operand, std::uint32_t(bits));
    if (sizeof(T) == 2 && high) bits >>= 16;
    for (int i = 0; i < kMaxLanes; ++i) out[i] = from_bits<T>(bits);
  } else if constexpr (sizeof(T) == 8) {
    const auto& lo = wave.v[operand.reg];
    const auto& hi = wave.v[operand.reg + 1];
    for (int i = 0; i < kMaxLanes; ++i) out[i] = from_bits<T>(std::uint64_t(hi[i]) << 32 | lo[i]);
  } else {
    Lanes<std::uint32_t> bits;
    std::memcpy(&bits, wave.v[operand.reg], sizeof bits);
    if (dpp) permute_dpp(wave, *dpp, bits);
    if (operand.part != Part::dword)
      for (int i = 0; i < kMaxLanes; ++i) bits[i] = take_part(operand, bits[i]);
    const int shift = sizeof(T) == 2 && high ? 16 : 0;
    for (int i = 0; i < kMaxLanes; ++i) out[i] = from_bits<T>(bits[i] >> shift);
  }
  input_modifiers(operand, out);
  return out;
}

template <class T>
Lanes<T> load(const Wave& wave, const Op& op, int index, bool high = false) {
  const bool permuted = op.dpp != Dpp::none && index == op.opcode->results;
  return load_operand<T>(wave, op.operand[index], high, permuted ? &op : nullptr);
}

// Lanes in which the low 32 bits of an operand are defined.
std::uint64_t low_word_defined(const Wave& wave, const Operand& operand);

// Lanes in which an operand's value is defined: of 32-bit values per half, of wider ones in every register.
Halves operand_defined(const Wave& wave, const Operand& operand);
Halves load_defined(const Wave& wave, const Op& op, int index);  // DPP included
template <class T>
std::uint64_t value_defined(const Wave& wave, const Op& op, int index, bool high = false) {
  const Halves halves = load_defined(wave, op, index);
  if constexpr (sizeof(T) == 2) return high ? halves.hi : halves.lo;
  return halves.both();
}

// Puts results into the part of their register that an SDWA form writes.
void place_part(const Wave& wave, const Op& op, int reg, Lanes<std::uint32_t>& bits, Halves& defined);

void store_bits(Wave& wave, int reg, const std::uint32_t* value, std::uint64_t lanes);
void store_defined(Wave& wave, int reg, Halves defined, std::uint64_t lanes);

// NaN becomes 0, as DX10_CLAMP has it.
inline float clamped(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }

// Stores a result; 16-bit ones go into the low half, or into the high one by op_sel.
template <class T>
void store(Wave& wave, const Op& op, int index, Lanes<T>& value, Halves defined, bool high = false) {
  const Operand& operand = op.operand[index];
  const std::uint64_t lanes = written_lanes(wave, op);
  if constexpr (sizeof(T) == 8) {
    Lanes<std::uint32_t> lo, hi;
    for (int i = 0; i < kMaxLanes; ++i) {
      lo[i] = std::uint32_t(to_bits(value[i]));
      hi[i] = std::uint32_t(to_bits(value[i]) >> 32);
    }
    store_bits(wave, operand.reg, lo.lane, lanes);
    store_bits(wave, operand.reg + 1, hi.lane, lanes);
    store_defined(wave, operand.reg, defined, lanes);
    store_defined(wave, operand.reg + 1, defined, lanes);
  } else {
    if constexpr (std::is_same_v<T, float>) {
      if (op.clamp)
        for (int i = 0; i < kMaxLanes; ++i) value[i] = clamped(value[i]);
    }
    Lanes<std::uint32_t> bits;
    for (int i = 0; i < kMaxLanes; ++i) bits[i] = std::uint32_t(to_bits(value[i]));
    if (op.result_part != Part::dword) {
      place_part(wave, op, operand.reg, bits, defined);
    } else if constexpr (sizeof(T) == 2) {
      const auto& old = wave.v[operand.reg];
      const Halves before = wave.v_defined[operand.reg];
      const std::uint64_t all = ~std::uint64_t(0);
      if (high) {
        for (int i = 0; i < kMaxLanes; ++i) bits[i] = bits[i] << 16 | (old[i] & 0xffff);
        defined = {before.lo, defined.lo};
      } else if (wave.target->keeps_high_half || (op.opcode->traits & kReadsResult)) {
        for (int i = 0; i < kMaxLanes; ++i) bits[i] |= old[i] & 0xffff0000u;
        defined = {defined.lo, before.hi};
      } else {
        defined = {defined.lo, all};
      }
    }
    store_bits(wave, operand.reg, bits.lane, lanes);
    store_defined(wave, operand.reg, defined, lanes);
  }
}

}  // namespace gfxsim
