// The choice of kernels on a GPU: which rows of the manifest compute a problem on a target, and why.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"
#include "hip/manifest.h"

namespace flash_attn::gpu {

// What decides between rows, beside the shapes: whether the plain variant's conditions hold.
struct VariantChoice {
  Variant variant;
  std::string reason;
};
VariantChoice choose_variant(const Problem& problem, bool regular);

// The rows that a pass launches, in this order. Throws NotSupported with what is missing.
std::vector<const KernelRow*> choose_kernels(const Problem& problem, Pass pass, const std::string& target,
                                             Variant variant);

// What puts new keys into a cache and rotates, as choose_kernels.
const KernelRow& append_kernel(const Problem& problem, const std::string& target);

// Kinds of targets in the manifest. Throws NotSupported for a target that no row is for.
Target target_kind(const std::string& target);

}  // namespace flash_attn::gpu
