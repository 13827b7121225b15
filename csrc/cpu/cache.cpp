#include "cpu/cache.h"

#include <cstring>

#include "core/thread_pool.h"

namespace flash_attn::cpu {
namespace {

template <class T>
T* row_of(const Operand& x, index_t b, index_t row, index_t h) {
  return static_cast<T*>(x.data) + b * x.batch_stride + row * x.row_stride + h * x.head_stride;
}

template <class T>
class CacheRows {
 public:
  CacheRows(const CacheProblem& c, RotateRow<T> rotate, char* rotated_q)
      : c_(c), p_(c.forward.problem), rotate_(rotate), rotated_{rotated_q, p_.Sq * p_.H * p_.D, p_.H * p_.D, p_.D} {}

  // Tasks for some key heads each, and for some rows of q; one for little work, which takes less time than threads do
  // to begin.
  void prepare(const Executor& executor) const {
    const index_t new_rows = p_.B * p_.storage.appended, q_rows = c_.rotary.given ? p_.B * p_.Sq : 0;
    const index_t elements = new_rows * p_.Hk * (p_.D + p_.Dv), of_q = q_rows * p_.H * p_.D;
    if (elements + of_q <= kRotatedPerTask) {
      append({0, p_.Hk});
      return rotate_queries({0, q_rows});
    }
    const index_t worth = elements / kRotatedPerTask;
    const index_t appending = min_of(p_.Hk, max_of<index_t>(1, min_of<index_t>(worth, executor.num_threads)));
    const index_t block = max_of<index_t>(1, kRotatedPerTask / (p_.H * p_.D));
    parallel_for(executor, appending + ceil_div(q_rows, block), [&](index_t task, int) {
      if (task < appending) return append({task * p_.Hk / appending, (task + 1) * p_.Hk / appending});
      const index_t first = (task - appending) * block;
      rotate_queries({first, min_of(q_rows, first + block)});
    });
  }
  Operand queries() const { return c_.rotary.given ? rotated_ : p_.q; }

 private:
  // Sequences in their order: of those that share a slot the last one wins, always.
  void append(Range heads) const {
    for (index_t b = 0; b < p_.B; ++b)
      for (index_t i = 0; i < p_.storage.appended; ++i) {
        const index_t position = p_.storage.used[b] + i;
        const KeyRun slot = p_.slots(b, position);
        if (c_.rotary.given)
          rotate_(c_.rotary, position, {row_of<T>(c_.k_new, b, i, heads.begin), c_.k_new.head_stride},
                  {row_of<T>(p_.k, slot.batch, slot.row, heads.begin), p_.k.head_stride}, heads.end - heads.begin,
                  p_.D);
        else
          copy(c_.k_new, b, i, p_.k, slot, heads, p_.D);
        copy(c_.v_new, b, i, p_.v, slot, heads, p_.Dv);
      }
  }
  static void copy(const Operand& from, index_t b, index_t i, const Operand& to, const KeyRun& slot, Range heads,
                   index_t features) {
    for (index_t h = heads.begin; h < heads.end; ++h)
      std::memcpy(row_of<T>(to, slot.batch, slot.row, h), row_of<T>(from, b, i, h),
                  static_cast<std::size_t>(features) * sizeof(T));
  }
  void rotate_queries(Range rows) const {
    for (index_t row = rows.begin; row < rows.end; ++row) rotate_query(row / p_.Sq, row % p_.Sq);
  }
  void rotate_query(index_t b, index_t i) const {
    const index_t position = p_.storage.used[b] + (c_.position_per_row ? i : 0);
    rotate_(c_.rotary, position, {row_of<T>(p_.q, b, i, 0), p_.q.head_stride},
            {row_of<T>(rotated_, b, i, 0), rotated_.head_stride}, p_.H, p_.D);
  }

  const CacheProblem& c_;
  const Problem& p_;
  const RotateRow<T> rotate_;
  const Operand rotated_;
};

template <class T>
Operand prepare(const CacheProblem& c, const Rotations& rotations, char* rotated_q, const Executor& executor) {
  const CacheRows<T> rows(c, rotations.of<T>(), rotated_q);
  rows.prepare(executor);
  return rows.queries();
}

}  // namespace

index_t rotated_query_bytes(const CacheProblem& c) {
  const Problem& p = c.forward.problem;
  return c.rotary.given ? p.B * p.Sq * p.H * p.D * size_of(p.dtype) : 0;
}

Operand prepare_cache(const CacheProblem& c, const Rotations& rotations, char* rotated_q, const Executor& executor) {
  switch (c.forward.problem.dtype) {
    case DType::f16: return prepare<Half>(c, rotations, rotated_q, executor);
    case DType::bf16: return prepare<BFloat16>(c, rotations, rotated_q, executor);
    case DType::f64: return prepare<double>(c, rotations, rotated_q, executor);
    default: return prepare<float>(c, rotations, rotated_q, executor);
  }
}

}  // namespace flash_attn::cpu
