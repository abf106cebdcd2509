// A dense model of two layers, none of whose widths are alike.
#pragma once

#include "models/model_spec.h"

namespace tessera::models {

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

}  // namespace tessera::models
