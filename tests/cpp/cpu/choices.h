// What a test forces or prefers of the CPU backend goes back to what it was.
#pragma once

#include "cpu/cpuid.h"
#include "flash_attn/attention.h"

namespace flash_attn::testing {

struct Choices {
  const cpu::Core core = cpu::core();
  ~Choices() {
    force_cpu_instruction_set("");
    cpu::suppose_core(core);
  }
};

}  // namespace flash_attn::testing
