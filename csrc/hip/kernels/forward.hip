// The forward families: one kernel per manifest row.
#include "hip/kernels/append.h"
#include "hip/kernels/combine.h"
#include "hip/kernels/forward.h"
#include "hip/kernels/forward_dmask.h"

#define FA_FORWARD(Kernel, Args, family, dtype, D, Dv, variant, ...) \
  FA_DEFINE_KERNEL(fa_##family##_##dtype##_d##D##_##variant, Kernel, Args, family, dtype, D, Dv, variant, __VA_ARGS__)

#define FA_FAMILY_forward(...) FA_FORWARD(Forward, ForwardArgs, forward, __VA_ARGS__)
#define FA_FAMILY_append(...) FA_FORWARD(Append, AppendArgs, append, __VA_ARGS__)
#define FA_FAMILY_combine(...) FA_FORWARD(Combine, CombineArgs, combine, __VA_ARGS__)
#define FA_FAMILY_forward_dmask(...) FA_FORWARD(ForwardDmask, ForwardDmaskArgs, forward_dmask, __VA_ARGS__)

#include "hip/kernels/instances.h"
