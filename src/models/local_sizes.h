// LocalSizes: how much of a layer one rank holds. Layers are made from these, never from the spec's
// totals, so that a rank's part of a layer is the same class with smaller numbers.
//
// Next: decoder_layer.h, moe_layer.h.
#pragma once

#include <cstdint>

#include "models/model_spec.h"

namespace tessera::models {

struct LocalSizes {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t experts = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t shared_intermediate_size = 0;
};

/// Of a rank that holds all of every layer.
inline LocalSizes whole_sizes(const ModelSpec& spec) {
  LocalSizes sizes{.heads = spec.num_attention_heads,
                   .kv_heads = spec.num_key_value_heads,
                   .intermediate_size = spec.intermediate_size};
  if (spec.moe) {
    sizes.experts = spec.moe->num_experts;
    sizes.moe_intermediate_size = spec.moe->moe_intermediate_size;
    sizes.shared_intermediate_size = spec.moe->shared_intermediate_size;
  }
  return sizes;
}

}  // namespace tessera::models
