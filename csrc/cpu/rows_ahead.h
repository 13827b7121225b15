// What the next block of queries will load, asked for while the one before it is in work.
#pragma once

#include "cpu/workspace.h"

namespace flash_attn::cpu {

// Rows of a head, too far apart for the processor's own prefetchers. They are asked for into L2, some with each strip:
// many at a time would take the miss buffers from the strip's own loads, and cost as much as is gained. Forced inline,
// also since GCC 12 drops calls of a function that does nothing but prefetch.
struct RowsAhead {
  const char* first;
  index_t row_bytes, bytes, count;
  index_t share;  // Rows for a strip.

  FA_INLINE void ask(index_t strip) const {
    for (index_t n = strip * share; n < min_of((strip + 1) * share, count); ++n)
      for (index_t byte = 0; byte < bytes; byte += kCacheLine) FA_PREFETCH_L2(first + n * row_bytes + byte);
  }
};

// Queries, keys and values; none of them, unless set.
struct NextRows {
  RowsAhead q, k, v;
};

}  // namespace flash_attn::cpu
