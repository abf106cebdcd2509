// OptimizerRule: optimizer settings for the parameters that a pattern matches.
//
// A value of names alone, like the rules of precision.h; an optimizer applies it when it is made.
// Pure. Next: optim.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// One `[[optimizer.rule]]`. The last rule that matches a parameter and has a field decides it.
struct OptimizerRule {
  /// Patterns as PrecisionRule::match; each must match a parameter, which may be frozen.
  std::vector<std::string> match;
  /// Multiplies the learning rate of the step; at least 0.
  std::optional<double> lr_scale = std::nullopt;
  /// Replaces the optimizer's weight decay, also over no_decay.
  std::optional<double> weight_decay = std::nullopt;
  /// Whether the trainer's Muon splits weights that a model declares as fused (gate and up of
  /// experts); false = it steps such a weight as the one matrix that it is stored as. none = true.
  std::optional<bool> split_fused = std::nullopt;
  bool operator==(const OptimizerRule&) const = default;
};

}  // namespace tessera
