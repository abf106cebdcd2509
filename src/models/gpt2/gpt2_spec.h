// Gpt2Spec: what GPT-2's config.json says beyond the fields that every family has.
//
// ModelSpec's own max_position_embeddings is the number of learned positions, its rms_norm_eps that
// of the LayerNorms, its attention_dropout attn_pdrop. Next: gpt2.cpp.
#pragma once

namespace tessera::models {

/// Nothing here drops anything: kept for who reads the folder that is written.
struct Gpt2Spec {
  double embd_pdrop = 0.1;
  double resid_pdrop = 0.1;
  bool operator==(const Gpt2Spec&) const = default;
};

}  // namespace tessera::models
