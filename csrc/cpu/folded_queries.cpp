#include "cpu/folded_queries.h"

#include <cstring>
#include <utility>

#include "core/thread_pool.h"
#include "cpu/few_rows.h"
#include "cpu/pack.h"

namespace flash_attn::cpu {
namespace {

index_t real_size(const Problem& p) { return p.dtype == DType::f64 ? sizeof(double) : sizeof(float); }

// An LSE-shaped array as rows of one feature. Inputs are only read.
Operand statistics(const Problem& p, const void* data) {
  const index_t of_head = p.varlen ? p.Tq : p.Sq;
  return {const_cast<void*>(data), p.varlen ? 0 : p.H * of_head, 1, of_head};
}

}  // namespace

Problem fold_sizes(Problem p) {
  p.Sq *= p.group();
  p.Tq *= p.group();
  p.H = p.Hk;
  p.window_left = p.window_right = -1;
  return p;
}

FoldedQueries::FoldedQueries(const BackwardProblem& b, index_t first, const Executor& executor)
    : b_(b),
      executor_(executor),
      sequences_(choose(first)),
      memory_(bytes(), Workspace::Keep::no),
      folded_(place_in(memory_.data())) {
  const Problem &p = b_.problem, &folded = folded_.problem;
  each_head<false>([&](const auto& copy) {
    copy(p.q, folded.q, p.D, size_of(p.dtype));
    copy(b_.dout, folded_.dout, p.Dv, size_of(p.dtype));
    copy(b_.out, folded_.out, p.Dv, size_of(p.dtype));
    copy(statistics(p, b_.lse), statistics(folded, folded_.lse), 1, real_size(p));
    if (b_.dlse) copy(statistics(p, b_.dlse), statistics(folded, folded_.dlse), 1, real_size(p));
  });
}

void FoldedQueries::unfold() const {
  const Problem &p = b_.problem, &folded = folded_.problem;
  each_head<true>([&](const auto& copy) {
    copy(b_.dq, folded_.dq, p.D, size_of(p.dtype));
    copy(statistics(p, b_.softmax_d), statistics(folded, folded_.softmax_d), 1, real_size(p));
  });
}

Range FoldedQueries::choose(index_t first) {
  constexpr index_t kMostBytes = index_t(8) << 20;
  const Problem& p = b_.problem;
  const index_t of_row = p.Hk * (2 * (p.D + p.Dv) * size_of(p.dtype) + 3 * real_size(p));
  begins_.push_back(0);
  index_t end = first;
  while (end < p.B && (end == first || begins_.back() * of_row <= kMostBytes)) {
    const Sequence sequence = p.sequence(end++);
    begins_.push_back(begins_.back() + std::int32_t(is_folded(p, sequence) ? p.group() * sequence.q_len : 0));
  }
  return {first, end};
}

index_t FoldedQueries::place(char* memory, BackwardProblem& f) const {
  Problem& p = f.problem;
  p = fold_sizes(p);
  const index_t first = sequences_.begin, size = size_of(p.dtype);
  p.B = sequences_.end - first;
  p.Tq = begins_.back();
  if (p.varlen) {
    p.cu_seqlens_q = begins_.data();
    p.cu_seqlens_k += first;
  } else {
    p.Tk = p.B * p.Sk;
    for (Operand* const x : {&p.k, &p.v, &f.dk, &f.dv}) x->data = row_at(*x, size, first, 0, 0);
  }
  Carver c(memory);
  const auto take_rows = [&](index_t features) {
    char* const rows = c.take<char>(p.Hk * p.Tq * features * size);
    return Operand{rows, p.varlen ? 0 : p.Sq * features, features, p.Tq * features};
  };
  const auto take_statistics = [&] { return c.take<char>(p.Hk * p.Tq * real_size(p)); };
  p.q = take_rows(p.D);
  f.dout = take_rows(p.Dv);
  f.out = take_rows(p.Dv);
  f.dq = take_rows(p.D);
  f.lse = take_statistics();
  if (b_.dlse) f.dlse = take_statistics();
  f.softmax_d = take_statistics();
  return c.used();
}

index_t FoldedQueries::bytes() const {
  BackwardProblem unused = b_;
  return place(nullptr, unused);
}

BackwardProblem FoldedQueries::place_in(char* memory) const {
  BackwardProblem f = b_;
  place(memory, f);
  return f;
}

template <bool kBack, class Work>
void FoldedQueries::each_head(const Work& work) const {
  constexpr index_t kAlone = index_t(64) << 10;  // Bytes that one thread has copied before others are awake.
  const Problem &p = b_.problem, &folded = folded_.problem;
  Executor executor = executor_;
  if (folded.Hk * folded.Tq * p.D * size_of(p.dtype) <= kAlone) executor.num_threads = 1;
  parallel_for(executor, folded.B * folded.Hk, [&](index_t task, int) {
    const index_t b = task / folded.Hk, hk = task % folded.Hk;
    const Sequence here = folded.sequence(b), there = p.sequence(sequences_.begin + b);
    const index_t heads = here.q_len > 0 ? p.group() : 0;
    for (index_t g = 0; g < heads; ++g)
      work([&](const Operand& x, const Operand& of_folded, index_t features, index_t size) {
        char* from = row_at(x, size, sequences_.begin + b, there.q_begin, hk * heads + g);
        char* to = row_at(of_folded, size, b, here.q_begin + g * there.q_len, hk);
        index_t from_step = x.row_stride * size, to_step = of_folded.row_stride * size;
        if (kBack) std::swap(from, to), std::swap(from_step, to_step);
        for (index_t i = 0; i < there.q_len; ++i)
          std::memcpy(to + i * to_step, from + i * from_step, static_cast<std::size_t>(features * size));
      });
  });
}

}  // namespace flash_attn::cpu
