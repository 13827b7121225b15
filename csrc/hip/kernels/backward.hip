// The backward families: one kernel per manifest row.
#include "hip/kernels/backward_delta.h"
#include "hip/kernels/backward_keys.h"
#include "hip/kernels/backward_queries.h"

#define FA_BACKWARD(Kernel, family, dtype, D, Dv, variant, engine, tile, kept, waves, streamed, occupancy)             \
  using Kernel##_##dtype##_##D##_##variant = Kernel<Plan<engine<dtype, tile>, D, Dv, variant, kept, waves, streamed>>; \
  FA_DEFINE_KERNEL(fa_##family##_##dtype##_d##D##_##variant, Kernel##_##dtype##_##D##_##variant, BackwardArgs,         \
                   waves* FA_WAVE, occupancy)

#define FA_FAMILY_backward_delta(...) FA_BACKWARD(BackwardDelta, backward_delta, __VA_ARGS__)
#define FA_FAMILY_backward_dkdv(...) FA_BACKWARD(BackwardDkDv, backward_dkdv, __VA_ARGS__)
#define FA_FAMILY_backward_dk(...) FA_BACKWARD(BackwardDk, backward_dk, __VA_ARGS__)
#define FA_FAMILY_backward_dv(...) FA_BACKWARD(BackwardDv, backward_dv, __VA_ARGS__)
#define FA_FAMILY_backward_dq(...) FA_BACKWARD(BackwardDq, backward_dq, __VA_ARGS__)

#include "hip/kernels/instances.h"
