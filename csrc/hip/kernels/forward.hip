// The forward family: one kernel per manifest row.
#include "hip/kernels/forward.h"

#define FA_FAMILY_forward(dtype, D, Dv, variant, engine, tile, kept, waves, streamed, occupancy)                       \
  using Forward_##dtype##_##D##_##variant = Forward<Plan<engine<dtype, tile>, D, Dv, variant, kept, waves, streamed>>; \
  FA_DEFINE_KERNEL(fa_forward_##dtype##_d##D##_##variant, Forward_##dtype##_##D##_##variant, ForwardArgs,              \
                   waves* FA_WAVE, occupancy)

#include "hip/kernels/instances.h"
