#include "hip/host/choice.h"

#include <algorithm>
#include <cstdlib>

#include "flash_attn/gpu.h"
#include "hip/kernels/args.h"
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

constexpr index_t kKeysWorthARange = 128;

// Blocks that a multiprocessor runs at once, by their LDS and registers; more would wait for each other. AMD: its four
// SIMDs, and the 64 KB of LDS that all targets have at least. NVIDIA, where kernels take all of 255 registers: 8 waves.
index_t resident_blocks(const KernelRow& row) {
  const bool cuda = row.target == Target::cuda;
  const int waves = cuda ? 8 * row.occupancy : 4 * row.occupancy, lds = cuda ? 227 * 1024 : 64 * 1024;
  return max_of(1, min_of(waves / row.waves, lds / row.lds_bytes()));
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

// As many keys as some query of a block of `rows` may see.
index_t keys_of_block(const Problem& p, index_t rows) {
  if (p.window_left < 0 || p.window_right < 0) return p.Sk;
  return min_of(p.Sk, p.window_left + min_of(p.Sq, rows) + p.window_right);
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

const KernelRow& only_kernel(const Problem& p, Family family, const std::string& device_target) {
  if (const KernelRow* row = find(p, family, target_kind(device_target), Variant::general)) return *row;
  no_kernel(p, to_string(family), device_target);
}

namespace {

// As many ranges as there are multiprocessors for, of kernels that a row describes.
struct Ranges {
  const KernelRow& row;
  index_t blocks, keys;  // without ranges; that some query of a block may see

  Ranges(const Problem& p, const KernelRow& kernel)
      : row(kernel),
        blocks(ceil_div(p.Sq, index_t(kernel.block_rows())) * p.H * p.B),
        keys(keys_of_block(p, kernel.block_rows())) {}

  index_t asked_for(index_t num_splits) const {
    return min_of(num_splits, max_of<index_t>(1, ceil_div(keys, index_t(row.streamed_rows))));
  }
  index_t that_fill(int multiprocessors) const {
    if (blocks == 0) return 1;
    const index_t fitting = min_of<index_t>(resident_blocks(row) * multiprocessors / blocks, kMostSplits);
    return max_of<index_t>(1, min_of(fitting, ceil_div(keys, kKeysWorthARange)));
  }
  index_t count(const Problem& p, int multiprocessors) const {
    return p.num_splits > 0 ? asked_for(p.num_splits) : that_fill(multiprocessors);
  }
};

// Blocks of decode variants have a wave or two: it takes some to a multiprocessor to read memory as fast as one of the
// others does.
bool suits_decode_variant(const Problem& p, const KernelRow& row, int multiprocessors) {
  const Ranges ranges(p, row);
  return p.Sq <= row.block_rows() && ranges.blocks * ranges.count(p, multiprocessors) >= 2 * multiprocessors;
}

}  // namespace

SplitChoice choose_splits(const Problem& p, Pass pass, const GpuDevice& device, bool has_scratch) {
  SplitChoice choice;
  const Target target = target_kind(device.target);
  const KernelRow* row = narrowest(p, Family::forward, target, Variant::cache);
  if (!row || pass != Pass::forward) return choice;
  const KernelRow* decode = narrowest(p, Family::forward, target, Variant::decode);
  if (decode && suits_decode_variant(p, *decode, device.multiprocessors))
    row = decode, choice.variant = Variant::decode;
  // Without a cache there are other variants for more than decoding, which are faster while blocks suffice.
  const bool has_other = p.Sq > row->block_rows() && choose_variant(p, true).variant != Variant::cache;
  if (p.num_splits == 0 && has_other) return choice;
  const Ranges ranges(p, *row);
  const index_t count = ranges.count(p, device.multiprocessors);
  if (count == 1) return choice;
  const std::string why = p.num_splits > 0 ? "num_splits"
                                           : std::to_string(ranges.blocks) + " blocks would not fill " +
                                                 std::to_string(device.multiprocessors) + " multiprocessors";
  choice.reason = "keys in " + std::to_string(count) + " ranges: " + why;
  if (has_scratch) {
    choice.count = count;
  } else if (p.num_splits == 0) {
    choice.reason = "keys in one range: there is no scratch memory for more";
  } else {
    throw NotSupported("flash_attn: num_splits = " + std::to_string(p.num_splits) +
                       " needs GPU memory for results of ranges of keys, which GpuQueue::scratch does not lend; set "
                       "it, or pass num_splits = 0 or 1");
  }
  return choice;
}

VariantChoice choose_variant(const Problem& p, bool regular, const SplitChoice& splits) {
  const auto general = [](std::string why) { return VariantChoice{Variant::general, "general variant: " + why}; };
  const auto stored = [&](const char* where) {
    const char* name = splits.variant == Variant::decode ? "decode" : "cache";
    return VariantChoice{splits.variant, std::string(name) + " variant: keys in " + where};
  };
  const KeyStorage& s = p.storage;
  if (s.pages) return stored("pages");
  if (s.used || s.leftpad || s.batch_index) return stored("a cache");
  if (splits.count > 1) return stored("ranges");
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
