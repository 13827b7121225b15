// The backward families: one kernel per manifest row.
#include "hip/kernels/backward_delta.h"
#include "hip/kernels/backward_keys.h"
#include "hip/kernels/backward_queries.h"

#define FA_BACKWARD(Kernel, family, dtype, D, Dv, variant, ...)                                                   \
  FA_DEFINE_KERNEL(fa_##family##_##dtype##_d##D##_##variant, Kernel, BackwardArgs, family, dtype, D, Dv, variant, \
                   __VA_ARGS__)

#define FA_FAMILY_backward_delta(...) FA_BACKWARD(BackwardDelta, backward_delta, __VA_ARGS__)
#define FA_FAMILY_backward_dkdv(...) FA_BACKWARD(BackwardDkDv, backward_dkdv, __VA_ARGS__)
#define FA_FAMILY_backward_dk(...) FA_BACKWARD(BackwardDk, backward_dk, __VA_ARGS__)
#define FA_FAMILY_backward_dv(...) FA_BACKWARD(BackwardDv, backward_dv, __VA_ARGS__)
#define FA_FAMILY_backward_dq(...) FA_BACKWARD(BackwardDq, backward_dq, __VA_ARGS__)

#include "hip/kernels/instances.h"
