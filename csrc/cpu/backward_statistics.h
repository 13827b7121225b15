// What a row of queries has in the backward pass beside its operands.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/pack.h"

namespace flash_attn::cpu {

// Of some queries of a head: delta = rowsum(dout * out) - dlse, which is softmax_d if asked for, and the LSE in log2
// units; +inf makes every probability of an empty row 0.
template <class Target>
void load_statistics(const BackwardProblem& f, const RowFormat<Target>& format, index_t b, index_t h, Range queries,
                     typename Target::Real* lse_log2, typename Target::Real* delta, bool keep_softmax_d) {
  using Real = typename Target::Real;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Problem& p = f.problem;
  const index_t at = p.lse_offset(b, h) + queries.begin, row = p.sequence(b).q_begin + queries.begin;
  const index_t count = queries.end - queries.begin;
  const Real* const lse = static_cast<const Real*>(f.lse) + at;
  const auto rows = [&](const Operand& x) { return row_at(x, format.size, b, row, h); };
  format.dot_rows(rows(f.dout), f.dout.row_stride * format.size, rows(f.out), f.out.row_stride * format.size, count,
                  p.Dv, delta);
  const Real* const dlse = f.dlse ? static_cast<const Real*>(f.dlse) + at : nullptr;
  for (index_t i = 0; i < count; ++i) {
    if (dlse && std::isfinite(lse[i])) delta[i] -= dlse[i];
    lse_log2[i] = lse[i] == -kInfinity ? kInfinity : lse[i] * Real(kLog2e);
  }
  if (keep_softmax_d) std::copy_n(delta, count, static_cast<Real*>(f.softmax_d) + at);
}

}  // namespace flash_attn::cpu
