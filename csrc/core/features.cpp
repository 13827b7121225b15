#include "core/features.h"

#include <algorithm>

namespace flash_attn {

const char* to_string(Feature feature) noexcept {
  switch (feature) {
    case Feature::softcap: return "softcap";
    case Feature::alibi_slopes: return "alibi_slopes";
    case Feature::window: return "causal and window_size";
    case Feature::dropout: return "dropout_p";
    case Feature::attn_bias: return "attn_bias";
    case Feature::attn_mask: return "attn_mask";
    case Feature::key_bounds: return "key_begin and key_end";
    case Feature::learnable_sink: return "learnable_sink";
    case Feature::block_table: return "block_table";
    case Feature::cache_batch_idx: return "cache_batch_idx";
    case Feature::seqused_k: return "seqused_k (cache_seqlens)";
    case Feature::leftpad_k: return "leftpad_k (cache_leftpad)";
  }
  return "unknown";
}

std::vector<Feature> features_of(const Problem& p) {
  std::vector<Feature> features;
  const auto add = [&](bool used, Feature feature) {
    if (used) features.push_back(feature);
  };
  add(p.softcap > 0, Feature::softcap);
  add(p.alibi_slopes != nullptr, Feature::alibi_slopes);
  add(p.window_left >= 0 || p.window_right >= 0, Feature::window);
  add(p.dropout.active, Feature::dropout);
  add(p.bias.given(), Feature::attn_bias);
  add(p.mask.given(), Feature::attn_mask);
  add(p.key_begin.data != nullptr || p.key_end.data != nullptr, Feature::key_bounds);
  add(p.sink != nullptr, Feature::learnable_sink);
  add(p.storage.pages != nullptr, Feature::block_table);
  add(p.storage.batch_index != nullptr, Feature::cache_batch_idx);
  add(p.storage.used != nullptr, Feature::seqused_k);
  add(p.storage.leftpad != nullptr, Feature::leftpad_k);
  return features;
}

void require_features(const Problem& problem, const char* backend, std::initializer_list<Feature> supported) {
  for (const Feature feature : features_of(problem))
    if (std::find(supported.begin(), supported.end(), feature) == supported.end())
      throw NotSupported(std::string("flash_attn: the ") + backend + " backend does not support " + to_string(feature) +
                         " yet; leave it out, or move the tensors to the CPU");
}

}  // namespace flash_attn
