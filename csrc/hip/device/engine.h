// The matrix engines that this compilation's target has.
#pragma once

#include "hip/device/engine_fma.h"

#if FA_AMD
#include "hip/device/engine_amd.h"
#if defined(__GFX11__)
#include "hip/device/engine_wmma11.h"
#endif
#else
#include "hip/device/engine_cuda.h"
#endif
