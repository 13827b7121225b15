// What each instruction set multiplies of which dtype, as explain says it.
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <string>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

struct Multiplies {
  std::string fp32, bf16;
};

const std::map<std::string, Multiplies> kSets = {
    {"portable", {"portable", "portable"}},
    {"avx2", {"avx2", "avx2"}},
    {"avx512", {"avx512", "avx512"}},
    {"avx512_bf16", {"avx512", "avx512_bf16"}},
    {"amx_bf16_emulated", {"amx_bf16_emulated", "amx_bf16_emulated"}},
    {"amx_bf16", {"amx_bf16", "amx_bf16"}},
    {"neon", {"neon", "neon"}},
    {"neon_bf16", {"neon", "neon_bf16"}},
};

std::string explained(DType dtype) {
  Tensor q({1, 96, 2, 32}, dtype), k({1, 96, 2, 32}, dtype), v({1, 96, 2, 32}, dtype);
  AttentionProblem p;
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.softmax_scale = 1.0;
  const std::string forward = explain(p, Pass::forward).instruction_set;
  EXPECT_EQ(forward, explain(p, Pass::backward).instruction_set);
  return forward;
}

TEST(CpuInstructionSets, AreWhatExplainNames) {
  const Choices restored;
  std::cout << "instruction sets:";
  for (const std::string& isa : cpu_instruction_sets()) {
    std::cout << ' ' << isa;
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    cpu::suppose_core(cpu::Core::other);
    const Multiplies& expected = kSets.at(isa);
    EXPECT_EQ(explained(DType::f32), expected.fp32);
    EXPECT_EQ(explained(DType::bf16), expected.bf16);
    EXPECT_EQ(explained(DType::f64), "portable");
  }
  std::cout << '\n';
}

}  // namespace
}  // namespace flash_attn::testing
