// What the backward pass works on: a block of queries, which tasks of several key blocks share, and the memory of a
// worker.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu/on_demand.h"
#include "cpu/rows_ahead.h"
#include "cpu/slots.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// Packed operands and row statistics of one (query head, query block).
template <class Target>
struct BackwardBlock {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;

  Elem *q_transposed, *dout_transposed;  // B operands with queries in the lanes: (D, queries), (Dv, queries)
  Elem *q_direct, *dout_direct;          // B operands with features in the lanes: (queries, D), (queries, Dv)
  Real *lse_log2, *delta;                // queries
  Real* dq;                              // queries x stride
  index_t bytes;
};

// What tasks share of a query block. It has memory from its first key block to its last one.
template <class Target>
struct BackwardBlockState {
  std::atomic<index_t> turn;  // The key block whose contribution to dq comes next.
  OnDemand packed;
  index_t slot;  // Once packed.
};

// Query blocks of a unit meet a key block in chunks, whose sums are added up in their order, so that threads can share
// them. Where a block's products are a sum of their own that joins C, a chunk is a block, and nothing has to be summed
// apart unless there are several threads at it. Tiles continue the sum in C: their chunks, always summed apart, have so
// many queries that adding up does not show.
template <class Target>
index_t chunks_of_blocks(index_t query_blocks, index_t key_blocks, index_t queries) {
  constexpr index_t kTasks = 32, kMostQueries = 4096, kQueries = 1024;
  if (key_blocks == 0 || query_blocks == 0) return 1;
  if (!Target::kTiled) return query_blocks;
  const index_t least = ceil_div(min_of(kMostQueries, kQueries * key_blocks), queries);
  return max_of<index_t>(1, min_of(query_blocks / least, ceil_div(kTasks, key_blocks)));
}

// dK and dV of a key block, in accumulators. Those of its first chunk are summed in place, others join them by turns.
template <class Target>
struct KeySums {
  using Real = typename Target::Real;

  Real *dk, *dv;  // keys x stride, keys x v_stride
  index_t k_stride, v_stride;
  index_t keys;                // In use.
  std::atomic<index_t>* turn;  // One past the chunk that has joined last, where chunks have tasks of their own.
  index_t bytes;

  KeySums of(index_t so_many) const {
    KeySums sums = *this;
    sums.keys = so_many;
    return sums;
  }
  void clear() const {
    std::fill_n(dk, keys * k_stride, Real(0));
    std::fill_n(dv, keys * v_stride, Real(0));
  }
  void add(const KeySums& chunk) const {
    add(dk, chunk.dk, keys * k_stride);
    add(dv, chunk.dv, keys * v_stride);
  }
  void await(index_t chunk) const {
    while (turn->load(std::memory_order_acquire) != chunk + 1) std::this_thread::yield();
  }
  void pass_on(index_t chunk) const { turn->store(chunk + 1, std::memory_order_release); }

 private:
  static void add(Real* sum, const Real* x, index_t count) {
    using Simd = typename Target::Simd;
    for (index_t n = 0; n < count; n += Simd::W) Simd::store(sum + n, Simd::load(sum + n) + Simd::load(x + n));
  }
};

// From a row of a strip's S^T or dP^T to the next: all queries of a block, or, in tiles, so few that they stay in L1
// (forward_tiled.h says why).
template <class Target>
index_t gradient_pitch(Tiles tiles) {
  return Target::kTiled ? 32 : tiles.queries;
}

// The memory of a worker.
template <class Target>
struct BackwardScratch {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;

  Elem* staging;           // rows of q or dout on their way into a panel
  Elem *k, *v;             // keys x stride: multiplicands
  Elem* k_direct;          // B operand (keys, D)
  index_t* loaded;         // Which key block they are of: unit * key blocks + key block.
  RowsInTurn* asks;        // see backward_ahead.h
  KeySums<Target> sums;    // Of a task that is alone with its key block.
  KeySums<Target> chunk;   // Of the chunk in work, unless it is the first; only where there are several.
  Real *scores, *dp;       // kRows x gradient_pitch each: S^T then P^T; dP^T then dS^T
  Elem *p_rows, *ds_rows;  // kRows x queries, as multiplicands; the memory of scores and dp when kInPlace
  Elem* ds;                // keys x queries: dS^T of the whole key block, as A operand of dQ
  std::uint8_t* dropout;   // keys x queries, a bit each
  Real* addend;            // keys x queries, when there are bias, mask or row bounds; keys if alike for all queries
  Real* addend_rows;       // W x keys
  index_t bytes;
};

template <class Target>
struct BackwardWorker {
  int index;
  Slots& slots;
  char* blocks;  // BackwardBlock::bytes for each slot.
  BackwardScratch<Target> scratch;
};

}  // namespace flash_attn::cpu
