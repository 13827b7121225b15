// What a problem asks for beyond plain attention, so that a backend which lacks a feature can refuse it by name.
#pragma once

#include <initializer_list>
#include <vector>

#include "core/problem.h"

namespace flash_attn {

enum class Feature : std::uint8_t {
  softcap,
  alibi_slopes,
  window,
  dropout,
  attn_bias,
  attn_mask,
  key_bounds,
  learnable_sink,
  block_table,
  cache_batch_idx,
  seqused_k,
  leftpad_k,
};

/// The arguments that ask for it, such as "key_begin and key_end".
const char* to_string(Feature feature) noexcept;

std::vector<Feature> features_of(const Problem& problem);

/// Throws NotSupported, naming the first feature of `problem` that is not among `supported`.
void require_features(const Problem& problem, const char* backend, std::initializer_list<Feature> supported);

}  // namespace flash_attn
