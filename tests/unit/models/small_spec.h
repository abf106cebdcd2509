// Dense models: one to read descriptions off, and one to compute with.
#pragma once

#include <cstdint>

#include "models/model_spec.h"

namespace tessera::models {

/// Two layers, none of whose widths are alike.
inline ModelSpec small(Family family = Family::kQwen3) {
  ModelSpec spec;
  spec.family = family;
  spec.vocab_size = 128;
  spec.hidden_size = 32;
  spec.num_hidden_layers = 2;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 16;
  spec.intermediate_size = 80;
  return spec;
}

/// As few numbers as tell rows, heads, groups and widths apart.
inline ModelSpec tiny(Family family, std::int64_t layers = 1) {
  ModelSpec spec;
  spec.family = family;
  spec.vocab_size = 20;
  spec.hidden_size = 8;
  spec.num_hidden_layers = layers;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 4;
  spec.intermediate_size = 12;
  return spec;
}

}  // namespace tessera::models
