// Backward with few queries and key heads that several heads share: the queries of these heads as those of one head, as
// they meet the same keys by the same rule. By itself each head would fill a vector's lanes with its few queries.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// The problem with its heads folded, as far as sizes say.
Problem fold_sizes(Problem p);

// Some sequences of a problem, of which those that are folded (few_rows.h) have queries: rows of q, dout, out and the
// LSE, those of the heads that share a key head one after another, and room for dq and softmax_d.
class FoldedQueries {
 public:
  // Sequences from `first` on: as many as take few bytes, at least one.
  FoldedQueries(const BackwardProblem& b, index_t first, const Executor& executor);

  // For kernels that leave out sequences without queries.
  const BackwardProblem& problem() const { return folded_; }
  Range sequences() const { return sequences_; }
  // Writes dq and softmax_d to where the problem has them.
  void unfold() const;

 private:
  Range choose(index_t first);
  index_t place(char* memory, BackwardProblem& f) const;  // Returns the bytes that it takes.
  index_t bytes() const;
  BackwardProblem place_in(char* memory) const;
  // Calls work(copy) for each head of each folded sequence, where copy(x, folded, features, size) copies its rows of x
  // to the folded ones, or back.
  template <bool kBack, class Work>
  void each_head(const Work& work) const;

  const BackwardProblem& b_;
  const Executor& executor_;
  std::vector<std::int32_t> begins_;  // cu_seqlens_q of the folded rows.
  const Range sequences_;
  const Workspace memory_;
  const BackwardProblem folded_;
};

}  // namespace flash_attn::cpu
