// How a decoded wait is stored: Op::offset0 and offset1 are the counts (gfx9: vmcnt and lgkmcnt).
#pragma once

#include <cstdint>

namespace gfxsim {

constexpr std::int32_t kNoWait = -1;  // this counter is not waited for

}  // namespace gfxsim
