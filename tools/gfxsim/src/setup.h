// What the runtime and the hardware hand to a kernel: kernel arguments with the hidden ones filled in, and the first
// registers of every wave in the order of the ABI.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "program.h"
#include "workgroup.h"

namespace gfxsim {

struct Launch {
  const Program& program;
  const Kernel& kernel;
  Dim3 grid, block;
  std::uint32_t dynamic_lds = 0;
  std::vector<std::byte> kernarg;  // with hidden arguments
  std::vector<std::byte> packet;   // the AQL dispatch packet that a kernel may read
};

/// Throws Error when the launch is impossible (sizes, registers, float modes that are not simulated).
Launch prepare_launch(const Program& program, const Kernel& kernel, Dim3 grid, Dim3 block, std::uint32_t dynamic_lds,
                      std::span<const std::byte> kernargs);

/// Makes `group` ready to run workgroup number `index` of the grid.
void prepare_workgroup(const Launch& launch, std::uint64_t index, Workgroup& group);

}  // namespace gfxsim
