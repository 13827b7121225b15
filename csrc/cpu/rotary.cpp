#include "cpu/rotary.h"

#include "core/thread_pool.h"

namespace flash_attn::cpu {
namespace {

// Positions of rows that are asked for one after another.
class Positions {
 public:
  Positions(const RotaryProblem& r, index_t first) : r_(r) {
    if (!r.cu_seqlens.given()) return;
    // The last sequence that begins at or before `first`; empty ones before it begin there too.
    index_t end = r.cu_seqlens.size() - 1;
    while (sequence_ + 1 < end) {
      const index_t middle = (sequence_ + end) / 2;
      (r.cu_seqlens[middle] <= first ? sequence_ : end) = middle;
    }
  }

  // Of row `i` of batch element b; -1 behind the last sequence.
  index_t of(index_t b, index_t i) {
    if (!r_.cu_seqlens.given()) return at(b, i);
    while (sequence_ + 1 < r_.cu_seqlens.size() && r_.cu_seqlens[sequence_ + 1] <= i) ++sequence_;
    return sequence_ + 1 < r_.cu_seqlens.size() ? at(sequence_, i - r_.cu_seqlens[sequence_]) : -1;
  }

 private:
  index_t at(index_t sequence, index_t i) const {
    constexpr index_t far = index_t(1) << 62;  // No table is that long, and the sum stays in range.
    return i + r_.offset + (r_.offsets.given() ? min_of(max_of(r_.offsets[sequence], -far), far) : 0);
  }

  const RotaryProblem& r_;
  index_t sequence_ = 0;
};

template <class T>
void rotate_rows(const RotaryProblem& r, const Rotations& rotations, const Executor& executor) {
  const RotateRow<T> rotate_row = rotations.of<T>();
  const index_t total = r.B * r.rows, block = max_of<index_t>(1, kRotatedPerTask / max_of<index_t>(1, r.H * r.D));
  parallel_for(executor, ceil_div(total, block), [&](index_t task, int) {
    const index_t end = min_of(total, (task + 1) * block);
    Positions positions(r, task * block);
    for (index_t row = task * block; row < end; ++row) {
      const index_t b = row / r.rows, i = row % r.rows;
      const T* const x = static_cast<const T*>(r.x.data) + b * r.x.batch_stride + i * r.x.row_stride;
      T* const out = static_cast<T*>(r.out.data) + b * r.out.batch_stride + i * r.out.row_stride;
      rotate_row(r.rotary, positions.of(b, i), {x, r.x.head_stride}, {out, r.out.head_stride}, r.H, r.D);
    }
  });
}

}  // namespace

void rotate(const RotaryProblem& r, const Rotations& rotations, const Executor& executor) {
  switch (r.dtype) {
    case DType::f16: return rotate_rows<Half>(r, rotations, executor);
    case DType::bf16: return rotate_rows<BFloat16>(r, rotations, executor);
    case DType::f64: return rotate_rows<double>(r, rotations, executor);
    default: return rotate_rows<float>(r, rotations, executor);
  }
}

}  // namespace flash_attn::cpu
