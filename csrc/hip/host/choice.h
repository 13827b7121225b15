// The choice of kernels on a GPU: which rows of the manifest compute a problem on a target, and why.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"
#include "flash_attn/gpu.h"
#include "hip/manifest.h"

namespace flash_attn::gpu {

// In how many ranges a forward pass takes its keys: as many as num_splits says, or as fill the GPU.
struct SplitChoice {
  index_t count = 1;
  Variant variant = Variant::cache;  // For keys in a cache or in ranges: cache, or decode.
  std::string reason;                // Empty where there is nothing to tell.
};
// `has_scratch`: there is memory for results of ranges. Throws NotSupported where num_splits needs some that is not.
SplitChoice choose_splits(const Problem& problem, Pass pass, const GpuDevice& device, bool has_scratch);

// What decides between rows, beside the shapes. `regular`: whether the plain variant may read the tensors.
struct VariantChoice {
  Variant variant;
  std::string reason;
};
VariantChoice choose_variant(const Problem& problem, bool regular, const SplitChoice& splits = {});

// The rows that a pass launches, in this order. Throws NotSupported with what is missing.
std::vector<const KernelRow*> choose_kernels(const Problem& problem, Pass pass, const std::string& target,
                                             Variant variant);

// The kernel of a family that has one for each dtype: what puts new keys into a cache and rotates, what combines ranges
// of keys. As choose_kernels.
const KernelRow& only_kernel(const Problem& problem, Family family, const std::string& target);

// Kinds of targets in the manifest. Throws NotSupported for a target that no row is for.
Target target_kind(const std::string& target);

}  // namespace flash_attn::gpu
