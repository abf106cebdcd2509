// Gemma 3 and the text model of Gemma 4 share these defaults and keys of their configs.
//
// Private to those families' readers. Next: gemma3.cpp, ../gemma4/gemma4.cpp.
#pragma once

#include "models/family.h"
#include "models/model_spec.h"
#include "models/spec_keys.h"

namespace tessera::models {

/// transformers' values for keys that are absent.
inline ModelSpec gemma_spec(Family family) {
  return {.family = family,
          .hidden_size = 2304,
          .num_attention_heads = 8,
          .num_key_value_heads = 4,
          .head_dim = 256,
          .intermediate_size = 9216,
          .max_position_embeddings = 131072,
          .tie_word_embeddings = true,
          .pad_token_id = 0};
}

inline KeyRow gelu_row() {
  return always("hidden_activation", "gelu_pytorch_tanh", "the activation of the MLP");
}

}  // namespace tessera::models
