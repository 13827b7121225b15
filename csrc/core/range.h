// Intervals of queries, keys, rows and columns.
#pragma once

#include "core/platform.h"

namespace flash_attn {

// Half-open interval of positions.
struct Range {
  index_t begin, end;
  FA_INLINE bool empty() const { return begin >= end; }
  FA_INLINE bool has(index_t n) const { return begin <= n && n < end; }
};

}  // namespace flash_attn
