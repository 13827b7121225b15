// A decoded instruction: what handlers execute. Decoding happens once per module (parse.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace gfxsim {

struct Wave;
struct Op;
using Handler = void (*)(Wave&, const Op&);

// Numbers of scalar registers that are not plain SGPRs; the same for every target.
enum ScalarRegister : std::uint16_t {
  kFlatScratch = 102,
  kVcc = 106,
  kTtmp0 = 108,
  kNull = 124,
  kM0 = 125,
  kExec = 126,
  kScalarCount = 128,
};

// Vector registers: v0..v255, a0..a255, and one that decoding may use as a temporary.
enum VectorRegister : std::uint16_t { kAgpr0 = 256, kTemporary = 512, kVectorCount = 513 };

enum class Kind : std::uint8_t { none, vector, scalar, scc, constant };

// The part of a register that an operand is: in SDWA forms, and of 16-bit instructions of gfx11 (v7.l, v7.h).
enum class Part : std::uint8_t { dword, byte0, byte1, byte2, byte3, word0, word1 };

struct Operand {
  Kind kind = Kind::none;
  Part part = Part::dword;
  bool sign_extend = false;  // of a part
  bool negate = false, absolute = false;
  std::uint8_t dwords = 1;
  std::uint16_t reg = 0;
  std::uint64_t bits = 0;  // of a constant
};

enum class Class : std::uint8_t { salu, branch, wait, barrier, valu, trans, matrix, cross_lane, lds, smem, vmem, flat };
const char* class_name(Class c);

constexpr int part_shift(Part part) {
  return part == Part::dword || part == Part::word0 ? 0 : part == Part::word1 ? 16 : 8 * (int(part) - 1);
}
constexpr int part_bits(Part part) { return part == Part::dword ? 32 : part >= Part::word0 ? 16 : 8; }

// How constants are read and which registers and modifiers an opcode uses beyond its written operands.
enum Trait : std::uint32_t {
  kReadsResult = 1u << 0,   // the result keeps part of its old value
  kAccumulates = 1u << 13,  // the result is also the last source (fmac)
  kReadsVcc = 1u << 1,      // without writing so
  kReadsScc = 1u << 2,
  kWritesScc = 1u << 3,
  kPacked = 1u << 4,  // VOP3P: op_sel_hi defaults to ones
  kAcceptsClamp = 1u << 5,
  kShortFactors = 1u << 6,  // sources are 32 bits wide where `literal` says 64, but for the last
  kAcceptsOpSel = 1u << 7,
  kAcceptsDpp = 1u << 8,
  kAcceptsNegLoHi = 1u << 9,
  kReadsM0 = 1u << 10,
  kReturnsByModifier = 1u << 11,  // the result is written only when a modifier asks for it (atomics)
  kNoOperands = 1u << 12,         // the text after the mnemonic is for the decoder of that opcode alone
};

enum class Literal : std::uint8_t { b32, f16, b64, f64 };  // meaning of inline constants

struct Opcode {
  std::string name;
  Handler run = nullptr;
  Class kind = Class::valu;
  std::uint8_t results = 1;  // leading operands that are written
  Literal literal = Literal::b32;
  std::uint32_t traits = 0;   // Trait values, or-ed
  std::uint32_t flops = 0;    // of a matrix instruction, all lanes
  std::uint8_t operands = 0;  // how many must be written; 0: the handler takes several forms
};

enum class Dpp : std::uint8_t {
  none,
  quad_perm,
  row_shl,
  row_shr,
  row_ror,
  row_mirror,
  row_half_mirror,
  row_share,
  row_xmask,
  row_newbcast,
  row_bcast15,
  row_bcast31,
  wave_shl,
  wave_shr,
  wave_rol,
  wave_ror,
  dpp8
};

struct RegisterRange {
  Kind kind;
  bool written;
  std::uint16_t first, count;
};

struct Op {
  Handler run = nullptr;
  const Opcode* opcode = nullptr;
  std::array<Operand, 7> operand{};
  std::uint8_t operands = 0;

  std::int32_t offset0 = 0, offset1 = 0;  // memory offsets, wait counts, branch displacement, truth table
  std::uint8_t op_sel = 0, op_sel_hi = 0, neg_lo = 0, neg_hi = 0;
  bool clamp = false;
  Part result_part = Part::dword;
  bool keeps_rest = false;  // the other parts of the result stay, else they become zero
  bool returns_data = false, to_lds = false, offset_enable = false, index_enable = false;
  std::uint8_t cbsz = 0, abid = 0, blgp = 0;

  Dpp dpp = Dpp::none;
  std::uint32_t dpp_control = 0;  // row shift, or three (quad_perm: two) bits a lane
  std::uint8_t row_mask = 15, bank_mask = 15;
  bool bound_control = false, fetch_inactive = false;

  std::int32_t target = -1;  // index of the operation branched to
  std::vector<Op> parts;     // the two halves of a dual instruction, in an order that keeps their sources intact
  std::int16_t saved = -1;   // register that a dual instruction copies to kTemporary first

  std::uint64_t pc = 0;
  std::uint32_t bytes = 4;
  std::uint32_t index = 0;
  std::vector<RegisterRange> ranges;  // all registers read and written, for the check of waits
  std::uint8_t load_stream = 255;     // the stream in which loads by this instruction return
  std::string text;
  std::string unsupported;  // why it cannot run
};

}  // namespace gfxsim
