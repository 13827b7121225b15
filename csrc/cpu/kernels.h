// Instances of the kernels for one target; included once per instruction set, by the isa_*.cpp files.
#pragma once

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/isa.h"
#include "cpu/table_gradients.h"

namespace flash_attn::cpu {

template <class Target>
void run_forward(const ForwardProblem& problem, Range rows, const Executor& executor) {
  forward<Target>(problem, rows, executor);
}
// Backward, by strips of its own.
template <class Target, class Strips>
void run_backward(const BackwardProblem& problem, const Executor& executor) {
  Backward<Strips>(problem, executor).run();
  // These read softmax_d.
  if (problem.dsink) sink_gradient<Target>(problem, executor);
  if (problem.dbias.given()) BiasGradient<Target>(problem, executor).run();
}
template <class Target>
constexpr Kernels kernels_of(const char* instruction_set, const char* arithmetic) {
  return {instruction_set,
          arithmetic,
          Target::kRows,
          Target::kPanel,
          Target::kSize,
          most_rows<Target>(Approach::direct),
          most_rows<Target>(Approach::in_place),
          {Lanes<Target>::kMostDepth, Lanes<Target>::kKeys},
          kMostPairedFeatures<Target>,
          Target::kTiled ? kTooFewForTiles<Target> + 1 : 0,
          run_forward<Target>,
          {Target::kRows, Target::kPanel, run_backward<Target, Target>},
          {TallStrips<Target>::kRows, TallStrips<Target>::kPanel, run_backward<Target, TallStrips<Target>>}};
}

// Of sequences with few rows, in tiles: forward alone.
template <class Target>
constexpr Kernels direct_tile_kernels_of(const char* instruction_set, const char* arithmetic) {
  return {instruction_set,
          arithmetic,
          Target::kRows,
          kTileRows,
          Target::kSize,
          most_rows<Target>(Approach::direct),
          most_rows<Target>(Approach::direct),
          {},
          0,
          kTooFewForRowTiles + 1,
          run_forward<Target>,
          {},
          {}};
}

}  // namespace flash_attn::cpu
