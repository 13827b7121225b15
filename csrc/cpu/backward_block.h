// What the backward pass works on: a block of queries, which tasks of several key blocks share, and the memory of a
// worker.
#pragma once

#include <atomic>
#include <thread>

#include "cpu/on_demand.h"
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
  Real *dk, *dv;           // keys x stride
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
