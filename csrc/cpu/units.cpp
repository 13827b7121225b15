#include "cpu/units.h"

namespace flash_attn::cpu {

Units::Units(const Problem& p, index_t least_rows, index_t most_rows)
    : p_(p), sequences_(new index_t[std::size_t(p.B)]) {
  for (index_t b = 0; b < p.B; ++b) {
    const Sequence sequence = p.sequence(b);
    const index_t rows = sequence.q_len * p.group();
    if (rows < least_rows || rows > most_rows) continue;
    sequences_[count_++] = b;
    longest_q_ = max_of(longest_q_, sequence.q_len);
    longest_k_ = max_of(longest_k_, sequence.k_len);
  }
}

Units::~Units() { delete[] sequences_; }

}  // namespace flash_attn::cpu
