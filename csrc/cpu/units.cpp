#include "cpu/units.h"

#include "cpu/few_rows.h"

namespace flash_attn::cpu {

bool Sequences::have(const Problem& p, const Sequence& sequence) const {
  const index_t group = p.group();
  const auto is_which = [&] {
    switch (which) {
      case Which::folded: return is_folded(p, sequence);
      case Which::direct: return is_direct(p, sequence, direct_queries);
      case Which::others: return !is_folded(p, sequence) && !is_direct(p, sequence, direct_queries);
      default: return true;
    }
  };
  return rows.has(rows_together(sequence.q_len, group)) && keys.has(sequence.k_len) &&
         lengths.has(shorter_length(sequence.q_len, sequence.k_len, group)) && queries.has(sequence.q_len) &&
         is_which();
}

Units::Units(const Problem& p, const Sequences& sequences) : p_(p), sequences_(new index_t[std::size_t(p.B)]) {
  for (index_t b = 0; b < p.B; ++b) {
    const Sequence sequence = p.sequence(b);
    if (!sequences.have(p, sequence)) continue;
    sequences_[count_++] = b;
    longest_q_ = max_of(longest_q_, sequence.q_len);
    longest_k_ = max_of(longest_k_, sequence.k_len);
  }
}

Units::~Units() { delete[] sequences_; }

namespace {

// Zeros in the rows of x that no sequence owns: those after the last one.
void clear_slack_rows(const Problem& p, const Operand& x, index_t first, index_t total, index_t heads,
                      index_t features) {
  const index_t size = size_of(p.dtype);
  for (index_t row = first; p.varlen && row < total; ++row)
    for (index_t h = 0; h < heads; ++h)
      std::memset(row_at(x, size, 0, row, h), 0, static_cast<std::size_t>(features * size));
}

// An LSE-shaped array's slack, likewise.
template <class Real>
void fill_slack_lse(const Problem& p, Real* lse, Real value) {
  for (index_t h = 0; p.varlen && h < p.H; ++h)
    for (index_t row = p.cu_seqlens_q[p.B]; row < p.Tq; ++row) lse[h * p.Tq + row] = value;
}
void fill_slack_lse(const Problem& p, void* lse, double value) {
  if (p.dtype == DType::f64)
    fill_slack_lse(p, static_cast<double*>(lse), value);
  else
    fill_slack_lse(p, static_cast<float*>(lse), float(value));
}

}  // namespace

void clear_unwritten(const ForwardProblem& f) {
  const Problem& p = f.problem;
  clear_slack_rows(p, f.out, p.varlen ? p.cu_seqlens_q[p.B] : 0, p.Tq, p.H, p.Dv);
  fill_slack_lse(p, f.lse, std::numeric_limits<double>::infinity());
  if (f.s_dmask) std::memset(f.s_dmask, 0, static_cast<std::size_t>(p.B * p.H * p.Sq * p.Sk * size_of(p.dtype)));
}

void clear_unwritten(const BackwardProblem& b) {
  const Problem& p = b.problem;
  const index_t q_end = p.varlen ? p.cu_seqlens_q[p.B] : 0, k_end = p.varlen ? p.cu_seqlens_k[p.B] : 0;
  clear_slack_rows(p, b.dq, q_end, p.Tq, p.H, p.D);
  clear_slack_rows(p, b.dk, k_end, p.Tk, p.Hk, p.D);
  clear_slack_rows(p, b.dv, k_end, p.Tk, p.Hk, p.Dv);
  fill_slack_lse(p, b.softmax_d, 0);
}

}  // namespace flash_attn::cpu
