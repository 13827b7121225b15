// From a valid problem to what kernels are passed.
#pragma once

#include "core/problem.h"
#include "hip/kernels/args.h"
#include "hip/runtime/runtime.h"

namespace flash_attn::gpu {

// Throws NotSupported where sizes exceed the kernels' 32-bit ones.
ForwardArgs forward_args(const ForwardProblem& problem);
// `rotated`: where queries go, if they are rotated.
AppendArgs append_args(const CacheProblem& problem, const Operand& rotated);
ForwardDmaskArgs dmask_args(const ForwardProblem& problem);
BackwardArgs backward_args(const BackwardProblem& problem);

// Keys in `splits` ranges: the memory for their results, given to a launch of the forward kernel, and what combines
// them.
index_t scratch_bytes(const Problem& problem, index_t splits);
void give_scratch(SplitsArg& splits, const Problem& problem, void* scratch);
CombineArgs combine_args(const ForwardProblem& problem, const ForwardArgs& forward, int wave);

// Whether the plain variant may read the tensors (AttentionArgs::regular).
bool is_regular(const ForwardProblem& problem);
bool is_regular(const BackwardProblem& problem);
// By the inputs alone, for explain().
bool is_regular(const Problem& problem);

// The memory that a pass touches, for simulated runtimes.
std::vector<GpuRuntime::Buffer> buffers_of(const ForwardProblem& problem, const SplitsArg& splits);
std::vector<GpuRuntime::Buffer> buffers_of(const CacheProblem& problem, const Operand& rotated);  // Before attention.
std::vector<GpuRuntime::Buffer> buffers_of(const BackwardProblem& problem);

}  // namespace flash_attn::gpu
