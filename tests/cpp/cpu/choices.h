// What a test forces or prefers of the CPU backend goes back to what it was.
#pragma once

#include "cpu/cpuid.h"
#include "flash_attn/attention.h"

namespace flash_attn::testing {

struct Choices {
  const bool quick = cpu::has_quick_products();
  ~Choices() {
    force_cpu_instruction_set("");
    cpu::suppose_quick_products(quick);
  }
};

}  // namespace flash_attn::testing
