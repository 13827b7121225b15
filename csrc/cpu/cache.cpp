#include "cpu/cache.h"

#include <cstring>

#include "core/rotary.h"
#include "core/thread_pool.h"

namespace flash_attn::cpu {
namespace {

template <class T>
T* row_of(const Operand& x, index_t b, index_t row, index_t h) {
  return static_cast<T*>(x.data) + b * x.batch_stride + row * x.row_stride + h * x.head_stride;
}

// One task per head, sequences in their order: of sequences that share a slot the last one wins, always.
template <class T>
void append(const CacheProblem& c, const Executor& executor) {
  const Problem& p = c.forward.problem;
  parallel_for(executor, p.Hk, [&](index_t h, int) {
    for (index_t b = 0; b < p.B; ++b)
      for (index_t i = 0; i < p.storage.appended; ++i) {
        const index_t position = p.storage.used[b] + i;
        const KeyRun slot = p.slots(b, position);
        T* const k = row_of<T>(p.k, slot.batch, slot.row, h);
        if (c.rotary.given)
          rotate<T>(c.rotary, position, {row_of<T>(c.k_new, b, i, h), 0}, {k, 0}, 1, p.D);
        else
          std::memcpy(k, row_of<T>(c.k_new, b, i, h), static_cast<std::size_t>(p.D) * sizeof(T));
        std::memcpy(row_of<T>(p.v, slot.batch, slot.row, h), row_of<T>(c.v_new, b, i, h),
                    static_cast<std::size_t>(p.Dv) * sizeof(T));
      }
  });
}

template <class T>
Operand rotate_queries(const CacheProblem& c, char* memory, const Executor& executor) {
  const Problem& p = c.forward.problem;
  const Operand rotated{memory, p.Sq * p.H * p.D, p.H * p.D, p.D};
  parallel_for(executor, p.B * p.Sq, [&](index_t task, int) {
    const index_t b = task / p.Sq, i = task % p.Sq, position = p.storage.used[b] + (c.position_per_row ? i : 0);
    rotate<T>(c.rotary, position, {row_of<T>(p.q, b, i, 0), p.q.head_stride},
              {row_of<T>(rotated, b, i, 0), rotated.head_stride}, p.H, p.D);
  });
  return rotated;
}

template <class T>
Operand prepare(const CacheProblem& c, char* rotated_q, const Executor& executor) {
  append<T>(c, executor);
  return c.rotary.given ? rotate_queries<T>(c, rotated_q, executor) : c.forward.problem.q;
}

}  // namespace

index_t rotated_query_bytes(const CacheProblem& c) {
  const Problem& p = c.forward.problem;
  return c.rotary.given ? p.B * p.Sq * p.H * p.D * size_of(p.dtype) : 0;
}

Operand prepare_cache(const CacheProblem& c, char* rotated_q, const Executor& executor) {
  switch (c.forward.problem.dtype) {
    case DType::f16: return prepare<Half>(c, rotated_q, executor);
    case DType::bf16: return prepare<BFloat16>(c, rotated_q, executor);
    case DType::f64: return prepare<double>(c, rotated_q, executor);
    default: return prepare<float>(c, rotated_q, executor);
  }
}

}  // namespace flash_attn::cpu
