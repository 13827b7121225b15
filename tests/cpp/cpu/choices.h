// What a test forces or prefers of the CPU backend goes back to what it was.
#pragma once

#include "cpu/cpuid.h"
#include "flash_attn/attention.h"

namespace flash_attn::testing {

struct Choices {
  const bool lanes = cpu::prefers_lanes();
  ~Choices() {
    force_cpu_instruction_set("");
    cpu::prefer_lanes(lanes);
  }
};

}  // namespace flash_attn::testing
