// main() of every C++ test program. Exit status 77, which ctest reports as skipped, when FLASH_ATTN_CPU_ISA asks for an
// instruction set that this build or machine does not have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "flash_attn/attention.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* forced = std::getenv("FLASH_ATTN_CPU_ISA")) {
    const auto available = flash_attn::cpu_instruction_sets();
    if (std::find(available.begin(), available.end(), forced) == available.end()) {
      std::cout << "skipped: this machine or build has no " << forced << " (it has";
      for (const auto& name : available) std::cout << ' ' << name;
      std::cout << ")\n";
      return 77;
    }
  }
  return RUN_ALL_TESTS();
}
