// RopeOptions: which rotary embedding a model has, as a config.json says it.
//
// Pure. One record from the file's keys (models/spec_keys.h) to the tables (rope.h). The fields
// carry the names of the file's keys.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::nn {

enum class RopeType : std::uint8_t {
  kDefault,
  kLlama3,        ///< lengthens long wavelengths by `factor`, keeps short ones, blends between
  kProportional,  ///< turns the first pairs only, by the frequencies of the whole head over
                  ///< `factor`
  /// Slows a pair by `factor` where it turns less than `beta_slow` times in the original context,
  /// not where more than `beta_fast` times, blends between, linearly over the pairs' numbers.
  kYarn,
  kLinear,  ///< slows every pair by `factor`
  /// Slows each pair by a factor of its own, another one in rows longer than the original context
  /// (Ding et al., "LongRoPE", arXiv 2402.13753).
  kLongRope,
};

/// The options of yarn in addition to factor and original_max_position_embeddings.
struct YarnOptions {
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::optional<double> mscale = std::nullopt;
  std::optional<double> mscale_all_dim = std::nullopt;
  std::optional<double> attention_factor = std::nullopt;
  bool truncate = true;  ///< the two borders between pairs are rounded outwards to whole numbers
  bool operator==(const YarnOptions&) const = default;
};

/// Holds a factor for each pair that turns.
struct LongRopeOptions {
  std::vector<double> short_factor;  ///< of rows that the original context holds
  std::vector<double> long_factor;
  std::optional<double> attention_factor = std::nullopt;
  bool operator==(const LongRopeOptions&) const = default;
};

/// The frequency factors are used by kLlama3 only. The partial factor is the part of a head that
/// turns: for kProportional by the frequencies of the whole head, else by those of a head of that
/// part's size.
struct RopeOptions {
  double theta = 10000.0;
  RopeType type = RopeType::kDefault;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  std::int64_t original_max_position_embeddings = 0;
  double partial_rotary_factor = 1.0;
  YarnOptions yarn = {};                                    ///< of kYarn only
  std::optional<LongRopeOptions> long_rope = std::nullopt;  ///< of kLongRope, and of no other
  bool operator==(const RopeOptions&) const = default;
};

/// 0.1 m ln(factor) + 1, yarn's growth of attention with the context.
inline double yarn_growth(double factor, double m) {
  return factor <= 1.0 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

/// The most positions of a row that has the frequencies of a short one; none where all rows have
/// the same.
inline std::optional<std::int64_t> longest_short_row(const RopeOptions& rope) {
  if (rope.type != RopeType::kLongRope) return std::nullopt;
  return rope.original_max_position_embeddings;
}

/// The factor of cos and sin, in fp32 before they are rounded: 1 except for yarn and longrope.
inline double table_factor(const RopeOptions& rope) {
  if (rope.type == RopeType::kLongRope) {
    if (rope.long_rope->attention_factor) return *rope.long_rope->attention_factor;
    if (rope.factor <= 1.0) return 1.0;
    const auto context = static_cast<double>(rope.original_max_position_embeddings);
    return std::sqrt(1.0 + std::log(rope.factor) / std::log(context));
  }
  if (rope.type != RopeType::kYarn) return 1.0;
  if (rope.yarn.attention_factor) return *rope.yarn.attention_factor;
  const double m = rope.yarn.mscale.value_or(0.0);
  const double all = rope.yarn.mscale_all_dim.value_or(0.0);
  // As transformers has it: a zero counts as absent.
  if (m != 0.0 && all != 0.0) return yarn_growth(rope.factor, m) / yarn_growth(rope.factor, all);
  return yarn_growth(rope.factor, 1.0);
}

/// The factor of deepseek-v2's softmax scale: 1 except for yarn with mscale_all_dim.
inline double softmax_factor(const RopeOptions& rope) {
  const double all = rope.yarn.mscale_all_dim.value_or(0.0);
  if (rope.type != RopeType::kYarn || all == 0.0) return 1.0;
  return yarn_growth(rope.factor, all) * yarn_growth(rope.factor, all);
}

}  // namespace tessera::nn
