// How rows of results reach memory: through the caches, or past them.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"
#include "cpu/cpuid.h"
#include "cpu/pack.h"

namespace flash_attn::cpu {

// What stores the rows of x, of results that take `bytes` in all.
template <class Target>
typename RowFormat<Target>::StoreRows result_rows(const RowFormat<Target>& format, const Operand& x, index_t features,
                                                  index_t bytes, const Executor& executor) {
  const auto whole_lines = [&](index_t elements) { return elements * format.size % kCacheLine == 0; };
  const bool streams = format.stream_rows && stores_past_caches(bytes, executor.num_threads) &&
                       reinterpret_cast<std::uintptr_t>(x.data) % kCacheLine == 0 && whole_lines(features) &&
                       whole_lines(x.head_stride) && whole_lines(x.row_stride) && whole_lines(x.batch_stride);
  return streams ? format.stream_rows : format.store_rows;
}

}  // namespace flash_attn::cpu
