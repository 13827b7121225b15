// What a test forces or prefers of the CPU backend goes back to what it was.
#pragma once

#include <string>
#include <vector>

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

// Sets whose kernels of that dtype are not another set's: bf16 products are for bf16 alone, and fp64 is the same code
// in all. An emulator is slow, and portable code has run where it was compiled: it has the processor's own sets alone.
inline std::vector<std::string> instruction_sets_that_differ(DType dtype) {
  if (dtype == DType::f64) return {"portable"};
  std::vector<std::string> sets = cpu_instruction_sets();
#if defined(FLASH_ATTN_TESTS_EMULATED)
  if (sets.size() > 1) std::erase(sets, "portable");
#endif
  if (dtype != DType::bf16)
    std::erase_if(sets, [](const std::string& isa) { return isa == "avx512_bf16" || isa == "neon_bf16"; });
  return sets;
}

// Whether the set multiplies many rows in vectors of 16 fp32, or two of half as many; those with tiles do it in these.
inline bool multiplies_in_vectors_of_16(const std::string& isa) { return isa.rfind("avx512", 0) == 0; }

// Cores for which kernels of that instruction set and dtype take different ways.
inline std::vector<cpu::Core> cores_that_differ(const std::string& isa, DType dtype) {
  if (dtype == DType::f64 || !multiplies_in_vectors_of_16(isa)) return {cpu::Core::other};
  if (dtype == DType::f16) return {cpu::Core::other, cpu::Core::zen4, cpu::Core::zen5};
  return {cpu::Core::other, cpu::Core::zen5};
}
inline const char* way_of(cpu::Core core) {
  if (core == cpu::Core::zen4) return "strips, scores in pairs";
  return core == cpu::Core::zen5 ? "queries in the lanes, tall strips" : "strips";
}

}  // namespace flash_attn::testing
