// The code objects that this build carries, compressed.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flash_attn::gpu {

// Every target with code objects, as compiled: "gfx942", "sm_90".
std::vector<std::string> embedded_targets();

// The embedded target whose kernels run on `device_target`: itself, or for NVIDIA the newest of the same major that is
// not newer. Empty when there is none.
std::string embedded_target_for(const std::string& device_target);

// The object itself, aligned for loaders. Throws Error when there is none or it is damaged.
std::vector<std::byte> unpack_code_object(const std::string& target, const std::string& name);

}  // namespace flash_attn::gpu
