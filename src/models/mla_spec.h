// MlaSpec: what a config.json says about multi-head latent attention.
//
// Next: model_spec.h, nn/mla.h.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::models {

/// The fields carry the names of the file's keys.
struct MlaSpec {
  std::optional<std::int64_t> q_lora_rank = std::nullopt;  ///< none = queries straight from x
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  bool operator==(const MlaSpec&) const = default;
};

}  // namespace tessera::models
