// What precedes attention over a cache: appending new keys and values, and rotating.
#pragma once

#include "cpu/rotary.h"

namespace flash_attn::cpu {

/// Bytes for a rotated copy of q; 0 without rotation.
index_t rotated_query_bytes(const CacheProblem& cache);

/// Writes the new keys, rotated, and values into their slots, and rotated queries into `rotated_q`.
/// Returns the queries to attend with.
Operand prepare_cache(const CacheProblem& cache, const Rotations& rotations, char* rotated_q, const Executor& executor);

}  // namespace flash_attn::cpu
