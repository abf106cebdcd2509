// RopeSpec: what a config.json says about rotary embeddings.
//
// Next: model_spec.h.
#pragma once

#include <cstdint>

namespace tessera::models {

enum class RopeType : std::uint8_t { kDefault, kLlama3, kProportional };

/// Rotary embedding. The frequency factors are used by kLlama3 only, the partial one by
/// kProportional only.
struct RopeSpec {
  double theta = 10000.0;
  RopeType type = RopeType::kDefault;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  std::int64_t original_max_position_embeddings = 0;
  double partial_rotary_factor = 1.0;
  bool operator==(const RopeSpec&) const = default;
};

}  // namespace tessera::models
