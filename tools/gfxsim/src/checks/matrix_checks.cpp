// Models of matrix instructions: every register element is put into a plain matrix by the formulas of AMD's matrix
// instruction calculator, the product is taken in double, and every element of the result is looked up by the inverse
// formulas.
#include <cmath>

#include "vector_row.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct Index {
  int row, k;  // for B: column
};
struct Position {
  int row, column;
};

struct MatrixRow {
  const char* instruction;  // D v[8:..], A v[0:..], B v[4:..] (gfx11: v[32:..]), C v[24:..] or a constant
  const char* target;
  int size, depth, element_bits, elements, results;  // elements: of A in one lane
  Index (*input)(int lane, int element);
  Position (*output)(int lane, int reg);
  bool bfloat;
  float constant;  // C, unless it is a register
  bool c_is_register;
};

Index mfma32(int lane, int e) { return {lane % 32, lane / 32 * 4 + e}; }
Index mfma16(int lane, int e) { return {lane % 16, lane / 16 * 4 + e}; }
Index mfma32_f32(int lane, int) { return {lane % 32, lane / 32}; }
Index mfma16_f32(int lane, int) { return {lane % 16, lane / 16}; }
Index wmma11(int lane, int e) { return {lane % 16, e}; }
Index wmma(int lane, int e) { return {lane % 16, e / 4 * 8 + lane / 16 * 4 + e % 4}; }
Position out32(int lane, int reg) { return {reg / 4 * 8 + lane / 32 * 4 + reg % 4, lane % 32}; }
Position out16(int lane, int reg) { return {lane / 16 * 4 + reg, lane % 16}; }
Position out_wmma11(int lane, int reg) { return {reg * 2 + lane / 16, lane % 16}; }
Position out_wmma(int lane, int reg) { return {lane / 16 * 8 + reg, lane % 16}; }

const std::vector<MatrixRow> kRows = {
    {"v_mfma_f32_32x32x8_f16 v[8:23], v[0:1], v[4:5], v[24:39]", "gfx942", 32, 8, 16, 4, 16, mfma32, out32, false, 0,
     true},
    {"v_mfma_f32_32x32x8_f16 v[8:23], v[0:1], v[4:5], 0", "gfx942", 32, 8, 16, 4, 16, mfma32, out32, false, 0, false},
    {"v_mfma_f32_32x32x8_bf16 v[8:23], v[0:1], v[4:5], v[24:39]", "gfx942", 32, 8, 16, 4, 16, mfma32, out32, true, 0,
     true},
    {"v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[4:5], v[24:27]", "gfx942", 16, 16, 16, 4, 4, mfma16, out16, false, 0,
     true},
    {"v_mfma_f32_16x16x16_bf16 v[8:11], v[0:1], v[4:5], v[24:27]", "gfx942", 16, 16, 16, 4, 4, mfma16, out16, true, 0,
     true},
    {"v_mfma_f32_16x16x16_bf16 v[8:11], v[0:1], v[4:5], 2.0", "gfx942", 16, 16, 16, 4, 4, mfma16, out16, true, 2,
     false},
    {"v_mfma_f32_32x32x2_f32 v[8:23], v0, v4, v[24:39]", "gfx942", 32, 2, 32, 1, 16, mfma32_f32, out32, false, 0, true},
    {"v_mfma_f32_16x16x4_f32 v[8:11], v0, v4, v[24:27]", "gfx942", 16, 4, 32, 1, 4, mfma16_f32, out16, false, 0, true},
    {"v_wmma_f32_16x16x16_f16 v[8:15], v[0:7], v[32:39], v[24:31]", "gfx1100", 16, 16, 16, 16, 8, wmma11, out_wmma11,
     false, 0, true},
    {"v_wmma_f32_16x16x16_bf16 v[8:15], v[0:7], v[32:39], v[24:31]", "gfx1100", 16, 16, 16, 16, 8, wmma11, out_wmma11,
     true, 0, true},
    {"v_wmma_f32_16x16x16_bf16 v[8:15], v[0:7], v[32:39], 1.0", "gfx1100", 16, 16, 16, 16, 8, wmma11, out_wmma11, true,
     1, false},
    {"v_wmma_f32_16x16x16_f16 v[8:15], v[0:3], v[4:7], v[24:31]", "gfx1201", 16, 16, 16, 8, 8, wmma, out_wmma, false, 0,
     true},
    {"v_wmma_f32_16x16x16_bf16 v[8:15], v[0:3], v[4:7], v[24:31]", "gfx1201", 16, 16, 16, 8, 8, wmma, out_wmma, true, 0,
     true},
    {"v_wmma_f32_16x16x16_bf16 v[8:15], v[0:3], v[4:7], 1.0", "gfx1201", 16, 16, 16, 8, 8, wmma, out_wmma, true, 1,
     false},
};

double value_of(const MatrixRow& row, u32 bits) {
  if (row.element_bits == 32) return In::f32(bits);
  return row.bfloat ? In::f32(bits << 16) : In::f16(bits);
}

// Small integers: exact in every format, and so is every sum.
u32 small_number(Bench& bench, const MatrixRow& row) {
  const float x = float(int(bench.word() % 17) - 8);
  if (row.element_bits == 32) return u32(bits_of(x));
  return u32(row.bfloat ? bits_of(x) >> 16 : half_of(x));
}

// gfx11: every lane's elements stand in lane + 16 once more.
bool holds_copies(const MatrixRow& row) { return row.input == wmma11; }

struct Operand2d {
  double at[32][16] = {};
};

Operand2d fill(Bench& bench, const MatrixRow& row, int first, bool exact) {
  Operand2d out;
  const double wide = 64.0;
  for (int lane = 0; lane < bench.lanes(); ++lane)
    for (int e = 0; e < row.elements; ++e) {
      u32 bits = small_number(bench, row);
      if (!exact) {
        const float x = (float(bench.word()) / 4294967296.0f - 0.5f) * float(wide);
        bits = u32(row.element_bits == 32 ? bits_of(x) : row.bfloat ? bits_of(x) >> 16 : half_of(x));
      }
      u32& word = bench.wave().v[first + (row.element_bits == 32 ? e : e / 2)][lane];
      word = row.element_bits == 32 ? bits : e % 2 ? (word & 0xffff) | bits << 16 : (word & 0xffff0000) | bits;
      const Index index = row.input(lane, e);
      if (holds_copies(row) && lane >= 16) {
        word = bench.wave().v[first + e / 2][lane - 16];
        continue;
      }
      out.at[index.row][index.k] = value_of(row, bits);
    }
  return out;
}

// One bit of one copy differs: that is reported, for A and for B.
std::string check_copies(Bench& bench, const MatrixRow& row) {
  for (const int reg : {0, 7, 32, 39}) {
    u32& word = bench.wave().v[reg][16 + bench.word() % 16];
    word ^= 1u << bench.word() % 32;
    if (bench.execute(row.instruction).find("operand-copies") == std::string::npos)
      return "the copies of v" + std::to_string(reg) + " differ without notice";
    word = bench.wave().v[reg][&word - bench.wave().v[reg] - 16];
  }
  return bench.execute(row.instruction);
}

std::string check(Bench& bench, const MatrixRow& row) {
  for (int round = 0; round < 8; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);  // these instructions ignore EXEC
    const bool exact = round < 5;
    const Operand2d a = fill(bench, row, 0, exact), b = fill(bench, row, holds_copies(row) ? 32 : 4, exact);
    float c[16][kMaxLanes];
    for (int reg = 0; reg < row.results; ++reg)
      for (int lane = 0; lane < bench.lanes(); ++lane) {
        const float x = exact ? float(int(bench.word() % 9) - 4) : float(bench.word()) / 4294967296.0f;
        bench.wave().v[24 + reg][lane] = u32(bits_of(x));
        c[reg][lane] = row.c_is_register ? x : row.constant;
      }
    if (const std::string problem = bench.execute(row.instruction); !problem.empty()) return problem;
    for (int reg = 0; reg < 64; ++reg)
      if (~bench.wave().v_defined[reg].both() & bench.wave().all_lanes())
        return "v" + std::to_string(reg) + " becomes undefined, though all inputs are defined";
    for (int reg = 0; reg < row.results; ++reg)
      for (int lane = 0; lane < bench.lanes(); ++lane) {
        const Position at = row.output(lane, reg);
        double sum = c[reg][lane], magnitude = std::fabs(sum);
        for (int k = 0; k < row.depth; ++k) {
          sum += a.at[at.row][k] * b.at[at.column][k];
          magnitude += std::fabs(a.at[at.row][k] * b.at[at.column][k]);
        }
        const double got = In::f32(bench.wave().v[8 + reg][lane]);
        if (std::fabs(got - sum) > (exact ? 0.0 : magnitude * 0x1p-22))
          return "row " + std::to_string(at.row) + ", column " + std::to_string(at.column) + " (lane " +
                 std::to_string(lane) + ", register " + std::to_string(reg) + "): " + std::to_string(got) + ", not " +
                 std::to_string(sum);
      }
  }
  return holds_copies(row) ? check_copies(bench, row) : "";
}

}  // namespace

void add_matrix_checks(Checks& checks) {
  for (const MatrixRow& row : kRows)
    add_check(checks, row.instruction, row.target,
              [row](Bench& bench, const std::string&) { return check(bench, row); });
}

}  // namespace gfxsim
