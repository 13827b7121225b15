#include "cpu/units.h"

namespace flash_attn::cpu {

Units::Units(const Problem& p, index_t least_rows, index_t most_rows)
    : p_(p), sequences_(new index_t[std::size_t(p.B)]) {
  for (index_t b = 0; b < p.B; ++b) {
    const Sequence sequence = p.sequence(b);
    const index_t rows = rows_together(sequence.q_len, p.group());
    if (rows < least_rows || rows > most_rows) continue;
    sequences_[count_++] = b;
    longest_q_ = max_of(longest_q_, sequence.q_len);
    longest_k_ = max_of(longest_k_, sequence.k_len);
  }
}

Units::~Units() { delete[] sequences_; }

void clear_slack_rows(const Problem& p, const Operand& x, index_t first, index_t total, index_t heads,
                      index_t features) {
  const index_t size = size_of(p.dtype);
  for (index_t row = first; p.varlen && row < total; ++row)
    for (index_t h = 0; h < heads; ++h)
      std::memset(row_at(x, size, 0, row, h), 0, static_cast<std::size_t>(features * size));
}

void clear_unwritten(const ForwardProblem& f) {
  const Problem& p = f.problem;
  clear_slack_rows(p, f.out, p.varlen ? p.cu_seqlens_q[p.B] : 0, p.Tq, p.H, p.Dv);
  if (p.dtype == DType::f64)
    fill_slack_lse(p, static_cast<double*>(f.lse), std::numeric_limits<double>::infinity());
  else
    fill_slack_lse(p, static_cast<float*>(f.lse), std::numeric_limits<float>::infinity());
  if (f.s_dmask) std::memset(f.s_dmask, 0, static_cast<std::size_t>(p.B * p.H * p.Sq * p.Sk * size_of(p.dtype)));
}

}  // namespace flash_attn::cpu
