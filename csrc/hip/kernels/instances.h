// Included last by every kernels/*.hip: defines the kernels of the families for which it has defined FA_FAMILY_*.
#include "hip/kernels/plan.h"

#ifndef FA_FAMILY_forward
#define FA_FAMILY_forward FA_NOTHING
#define FA_FAMILY_forward_dmask FA_NOTHING
#define FA_FAMILY_append FA_NOTHING
#define FA_FAMILY_combine FA_NOTHING
#endif
#ifndef FA_FAMILY_backward_delta
#define FA_FAMILY_backward_delta FA_NOTHING
#define FA_FAMILY_backward_dkdv FA_NOTHING
#define FA_FAMILY_backward_dk FA_NOTHING
#define FA_FAMILY_backward_dv FA_NOTHING
#define FA_FAMILY_backward_dq FA_NOTHING
#endif

namespace flash_attn::gpu {
#include "hip/manifest.def"
}  // namespace flash_attn::gpu
