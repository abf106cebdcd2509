// RopeSpec: what a config.json says about rotary embeddings.
//
// Next: rope_keys.h (reading and writing), nn/rope.h (the tables).
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::models {

enum class RopeType : std::uint8_t { kDefault, kLlama3, kProportional, kYarn };

/// What yarn needs beside factor and original_max_position_embeddings.
struct YarnSpec {
  double beta_fast = 32.0;  ///< turns in the original context above which a pair keeps its speed
  double beta_slow = 1.0;   ///< below which it is slowed down by the whole factor
  std::optional<double> mscale = std::nullopt;
  std::optional<double> mscale_all_dim = std::nullopt;
  std::optional<double> attention_factor = std::nullopt;
  bool truncate = true;  ///< the borders between pairs are rounded to whole ones
  bool operator==(const YarnSpec&) const = default;
};

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
  YarnSpec yarn = {};  ///< of kYarn only
  bool operator==(const RopeSpec&) const = default;
};

/// What cos and sin are multiplied by: 1 but for yarn.
double table_factor(const RopeSpec& rope);

/// What deepseek-v2 multiplies its softmax scale by: 1 but for yarn with mscale_all_dim.
double softmax_factor(const RopeSpec& rope);

}  // namespace tessera::models
