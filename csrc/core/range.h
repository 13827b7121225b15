// Intervals of queries, keys, rows and columns.
#pragma once

#include "core/platform.h"

namespace flash_attn {

// Half-open interval of positions.
struct Range {
  index_t begin, end;
  FA_INLINE bool empty() const { return begin >= end; }
};

}  // namespace flash_attn
