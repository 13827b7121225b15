// Instances of the kernels for one target; included once per instruction set, by the isa_*.cpp files.
#pragma once

#include "cpu/backward.h"
#include "cpu/backward_direct.h"
#include "cpu/forward.h"
#include "cpu/isa.h"
#include "cpu/table_gradients.h"

namespace flash_attn::cpu {

template <class Target>
void run_forward(const ForwardProblem& problem, const Sequences& sequences, const Executor& executor) {
  forward<Target>(problem, sequences, executor);
}
template <class Target>
void run_backward(const BackwardProblem& problem, const Sequences& sequences, const Executor& executor) {
  Backward<Target>(problem, sequences, executor).run();
}
template <class Target>
void run_backward_direct(const BackwardProblem& problem, const Sequences& sequences, const Executor& executor) {
  if constexpr (kHasBackwardDirect<Target>) BackwardDirect<Target>(problem, sequences, executor).run();
}
template <class Target>
void run_table_gradients(const BackwardProblem& problem, const Executor& executor) {
  if (problem.dsink) sink_gradient<Target>(problem, executor);
  if (problem.dbias.given()) BiasGradient<Target>(problem, executor).run();
}
template <class Target>
constexpr Kernels kernels_of(const char* instruction_set, const char* arithmetic) {
  static_assert(kDirectQueries<Target> <= kMostDirectQueries, "BackwardDirect has memory for so many");
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
          Target::kTiled ? kTooFewKeysForTiles<Target> + 1 : 0,
          Target::kTiled ? kTooShortForTiles<Target> + 1 : 0,
          run_forward<Target>,
          {Target::kRows, Target::kPanel, run_backward<Target>},
          {TallStrips<Target>::kRows, TallStrips<Target>::kPanel, run_backward<TallStrips<Target>>},
          std::is_same_v<typename Target::Real, float> ? kDirectQueries<Target> : 0,
          kHasBackwardDirect<Target> ? run_backward_direct<Target> : nullptr,
          run_table_gradients<Target>};
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
          0,
          0,
          run_forward<Target>,
          {},
          {},
          0,
          nullptr,
          nullptr};
}

}  // namespace flash_attn::cpu
