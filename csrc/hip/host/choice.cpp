#include "hip/host/choice.h"

#include <algorithm>
#include <cstdlib>

#include "flash_attn/gpu.h"
#include "hip/runtime/code_objects.h"

namespace flash_attn::gpu {
namespace {

std::string embedded_list() {
  std::string text;
  for (const std::string& target : embedded_targets()) text += (text.empty() ? "" : ", ") + target;
  if (!text.empty()) return "this build has code for: " + text;
  return "this build has no GPU code: " + missing_code_objects();
}

std::string all_targets() {
#define FA_LISTED(name, kind) #name ", "
  return FA_AMD_TARGETS(FA_LISTED) "and sm_80 or later";
#undef FA_LISTED
}

// The narrowest row that holds D and Dv.
const KernelRow* narrowest(const Problem& p, Family family, Target target, Variant variant) {
  const KernelRow* best = nullptr;
  for (const KernelRow& row : kKernels) {
    if (row.family != family || row.target != target || row.dtype != p.dtype || row.variant != variant) continue;
    if (row.D < p.D || row.Dv < p.Dv) continue;
    if (!best || row.D + row.Dv < best->D + best->Dv) best = &row;
  }
  return best;
}

// The general variant computes whatever the plain one does.
const KernelRow* find(const Problem& p, Family family, Target target, Variant variant) {
  const KernelRow* row = narrowest(p, family, target, variant);
  return row || variant != Variant::plain ? row : narrowest(p, family, target, Variant::general);
}

[[noreturn]] void no_kernel(const Problem& p, const char* pass, const std::string& target) {
  std::int64_t D = 0, Dv = 0;
  for (const KernelRow& row : kKernels)
    if (row.target == target_kind(target) && row.dtype == p.dtype)
      D = std::max<std::int64_t>(D, row.D), Dv = std::max<std::int64_t>(Dv, row.Dv);
  throw NotSupported("flash_attn: no " + std::string(pass) + " kernel on " + target + " for " + to_string(p.dtype) +
                     " with head dims D = " + std::to_string(p.D) + ", Dv = " + std::to_string(p.Dv) +
                     (D ? "; kernels of this dtype go up to D = " + std::to_string(D) + ", Dv = " + std::to_string(Dv)
                        : "; accepted dtypes: float16, bfloat16, float32") +
                     ". Such tensors can be computed on the CPU");
}

}  // namespace

Target target_kind(const std::string& target) {
  if (const std::optional<Target> kind = amd_target(target)) return *kind;
  if (target.rfind("sm_", 0) == 0 && std::atoi(target.c_str() + 3) >= 80) return Target::cuda;
  throw NotSupported("flash_attn: there are no kernels for the GPU " + target + "; kernels exist for " + all_targets() +
                     "; " + embedded_list() + ". Move the tensors to the CPU");
}

const KernelRow& append_kernel(const Problem& p, const std::string& device_target) {
  if (const KernelRow* row = find(p, Family::append, target_kind(device_target), Variant::general)) return *row;
  no_kernel(p, "append", device_target);
}

VariantChoice choose_variant(const Problem& p, bool regular) {
  const auto general = [](std::string why) { return VariantChoice{Variant::general, "general variant: " + why}; };
  const KeyStorage& s = p.storage;
  if (s.pages) return {Variant::cache, "cache variant: keys in pages"};
  if (s.used || s.leftpad || s.batch_index) return {Variant::cache, "cache variant: keys in a cache"};
  if (p.dtype == DType::f32) return general("float32 has no other");
  if (p.softcap > 0) return general("softcap");
  if (p.alibi_slopes) return general("ALiBi");
  if (p.dropout.active) return general("dropout");
  if (p.window_left >= 0 || p.window_right > 0) return general("sliding window");
  if (!(p.scale > 0)) return general("softmax_scale is not positive");
  if (!regular) return general("tensors that are not 16-byte aligned in base, strides or head dim");
  return {Variant::plain,
          p.window_right == 0 ? "plain variant: causal, aligned tensors" : "plain variant: no mask, aligned tensors"};
}

std::vector<const KernelRow*> choose_kernels(const Problem& p, Pass pass, const std::string& device_target,
                                             Variant variant) {
  const Target target = target_kind(device_target);
  if (embedded_target_for(device_target).empty())
    throw NotSupported("flash_attn: this build has no code objects for the GPU " + device_target + "; " +
                       embedded_list() + ". Build with GPU_ARCHS=" + device_target);
  std::vector<const KernelRow*> rows;
  const auto add = [&](Family family) {
    // What writes S_dmask, or new keys, comes in one variant.
    const bool has_one = family == Family::forward_dmask || family == Family::append;
    const KernelRow* row = find(p, family, target, has_one ? Variant::general : variant);
    if (row) rows.push_back(row);
    return row != nullptr;
  };
  if (pass != Pass::backward) {
    if (!add(Family::forward)) no_kernel(p, "forward", device_target);
    if (p.storage.appended > 0 && !add(Family::append)) no_kernel(p, "append", device_target);
    if (pass == Pass::forward_and_s_dmask && !add(Family::forward_dmask)) no_kernel(p, "S_dmask", device_target);
    return rows;
  }
  const auto add_keys = [&] {
    return add(Family::backward_dkdv) || (add(Family::backward_dk) && add(Family::backward_dv));
  };
  if (!add(Family::backward_delta) || !add_keys() || !add(Family::backward_dq)) no_kernel(p, "backward", device_target);
  return rows;
}

}  // namespace flash_attn::gpu
