// Matrix instructions: MFMA (gfx9) and WMMA (gfx11, gfx12), by the layouts of AMD's matrix instruction calculator.
// Products are summed in float, in order of k, with one rounding each for the product-and-add: hardware sums in an
// order of its own.
#include <string>

#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct Place {
  int lane, element;
};

// Where element A[i][k] (equally B[k][j]) lies, and C/D[i][j] with `element` the register. `copies` of A and B stand in
// successive parts of the wave.
template <int kSize, int kPerLane>
struct MfmaLayout {
  static constexpr int copies = 1, size = kSize, depth = 64 / kSize * kPerLane, elements = kPerLane;
  static constexpr int results = kSize * kSize / 64;
  static Place input(int i, int k) { return {kSize * (k / kPerLane) + i, k % kPerLane}; }
  static Place output(int i, int j) {
    if constexpr (kSize == 32) return {32 * (i / 4 % 2) + j, 4 * (i / 8) + i % 4};
    return {16 * (i / 4) + j, i % 4};
  }
};
struct Gfx11Wmma {
  static constexpr int copies = 2, size = 16, depth = 16, elements = 16, results = 8;
  static Place input(int i, int k) { return {i, k}; }
  static Place output(int i, int j) { return {16 * (i % 2) + j, i / 2}; }
};
struct Gfx12Wmma {
  static constexpr int copies = 1, size = 16, depth = 16, elements = 8, results = 8;
  static Place input(int i, int k) { return {16 * (k / 4 % 2) + i, 4 * (k / 8) + k % 4}; }
  static Place output(int i, int j) { return {16 * (i / 8) + j, i % 8}; }
};

template <class T>
float element(const Wave& wave, int reg, Place at) {
  if constexpr (sizeof(T) == 4) return std::bit_cast<float>(wave.v[reg + at.element][at.lane]);
  const u32 word = wave.v[reg + at.element / 2][at.lane];
  if constexpr (sizeof(T) == 2) return to_float(T{std::uint16_t(word >> (16 * (at.element & 1)))});
}

template <class T>
bool element_defined(const Wave& wave, int reg, Place at) {
  if constexpr (sizeof(T) == 4) return wave.v_defined[reg + at.element].both() >> at.lane & 1;
  const Halves halves = wave.v_defined[reg + at.element / 2];
  return (at.element & 1 ? halves.hi : halves.lo) >> at.lane & 1;
}

// One row of A or column of B is defined when all of its elements are, in every copy.
template <class Layout, class T>
u32 defined_lines(const Wave& wave, int reg) {
  u32 lines = 0;
  for (int i = 0; i < Layout::size; ++i) {
    bool known = true;
    for (int k = 0; k < Layout::depth; ++k)
      for (int copy = 0; copy < Layout::copies; ++copy) {
        const Place at = Layout::input(i, k);
        known = known && element_defined<T>(wave, reg, {at.lane + 16 * copy, at.element});
      }
    lines |= u32(known) << i;
  }
  return lines;
}

// gfx11: lanes 16 to 31 must hold the same rows as lanes 0 to 15, whatever hardware makes of others.
void check_copies(Wave& wave, const Op& op, int index) {
  for (int reg = op.operand[index].reg; reg < op.operand[index].reg + op.operand[index].dwords; ++reg)
    for (int lane = 0; lane < 16; ++lane) {
      const u64 known = wave.v_defined[reg].both();
      if (!(known >> lane & known >> (lane + 16) & 1) || wave.v[reg][lane] == wave.v[reg][lane + 16]) continue;
      return report(wave, op, "operand-copies", lane,
                    "lane " + std::to_string(lane + 16) + " holds another v" + std::to_string(reg) +
                        " than this lane, where a matrix operand must be there twice");
    }
}

// D = A B + C for every lane: these instructions ignore EXEC.
template <class Layout, class T>
void run_matrix(Wave& wave, const Op& op) {
  constexpr int n = Layout::size, depth = Layout::depth;
  const int a = op.operand[1].reg, b = op.operand[2].reg;
  if constexpr (Layout::copies == 2) {
    check_copies(wave, op, 1);
    check_copies(wave, op, 2);
  }
  float rows[n][depth], columns[depth][n];
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < depth; ++k) {
      rows[i][k] = element<T>(wave, a, Layout::input(i, k));
      columns[k][i] = element<T>(wave, b, Layout::input(i, k));
    }
  const u32 known_rows = defined_lines<Layout, T>(wave, a), known_columns = defined_lines<Layout, T>(wave, b);
  const Operand& c = op.operand[3];
  const bool constant = c.kind != Kind::vector;
  const float initial = constant ? from_bits<float>(read_scalar(wave, c)) : 0.0f;
  float sums[n][n];
  u64 known[Layout::results] = {};
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      const Place at = Layout::output(i, j);
      sums[i][j] = constant ? initial : std::bit_cast<float>(wave.v[c.reg + at.element][at.lane]);
      const bool c_known = constant || (wave.v_defined[c.reg + at.element].both() >> at.lane & 1);
      known[at.element] |= u64(c_known && (known_rows >> i & 1) && (known_columns >> j & 1)) << at.lane;
    }
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < depth; ++k)
      for (int j = 0; j < n; ++j) sums[i][j] = std::fma(rows[i][k], columns[k][j], sums[i][j]);
  const int d = op.operand[0].reg;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      const Place at = Layout::output(i, j);
      wave.v[d + at.element][at.lane] = std::bit_cast<u32>(sums[i][j]);
    }
  for (int r = 0; r < Layout::results; ++r) store_defined(wave, d + r, {known[r], known[r]}, wave.all_lanes());
}

template <class T>
void run_wmma(Wave& wave, const Op& op) {
  wave.target->generation == 11 ? run_matrix<Gfx11Wmma, T>(wave, op) : run_matrix<Gfx12Wmma, T>(wave, op);
}

template <class Layout>
void add(OpcodeTable& t, Names names, Handler run) {
  const u32 flops = 2u * Layout::size * Layout::size * Layout::depth;
  t.add(names, {"", run, Class::matrix, 1, Literal::b32, 0, flops, 4});
}
template <class Layout, class T>
void add_mfma(OpcodeTable& t, Names names) {
  add<Layout>(t, names, run_matrix<Layout, T>);
}

}  // namespace

void add_matrix(OpcodeTable& t) {
  add_mfma<MfmaLayout<32, 4>, Half>(t, {"v_mfma_f32_32x32x8_f16", "v_mfma_f32_32x32x8f16"});
  add_mfma<MfmaLayout<16, 4>, Half>(t, {"v_mfma_f32_16x16x16_f16", "v_mfma_f32_16x16x16f16"});
  add_mfma<MfmaLayout<32, 4>, Bfloat>(t, {"v_mfma_f32_32x32x8_bf16", "v_mfma_f32_32x32x8bf16_1k"});
  add_mfma<MfmaLayout<16, 4>, Bfloat>(t, {"v_mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x16bf16_1k"});
  add_mfma<MfmaLayout<32, 1>, float>(t, {"v_mfma_f32_32x32x2_f32"});
  add_mfma<MfmaLayout<16, 1>, float>(t, {"v_mfma_f32_16x16x4_f32"});
  add<Gfx12Wmma>(t, {"v_wmma_f32_16x16x16_f16"}, run_wmma<Half>);
  add<Gfx12Wmma>(t, {"v_wmma_f32_16x16x16_bf16"}, run_wmma<Bfloat>);
}

}  // namespace gfxsim
