// OptimizerRule: how the parameters that a pattern matches are stepped otherwise than the rest.
//
// A value of names alone, as the rules of precision.h; what becomes of it an optimizer decides when
// it is made. Pure. Next: optim.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// One `[[optimizer.rule]]`. The last rule that matches a parameter and has a field decides it.
struct OptimizerRule {
  /// As PrecisionRule::match; each pattern must match a parameter, which may be frozen.
  std::vector<std::string> match;
  /// Multiplies the learning rate of the step; at least 0.
  std::optional<double> lr_scale = std::nullopt;
  /// Replaces the optimizer's weight decay, also over no_decay.
  std::optional<double> weight_decay = std::nullopt;
  /// Muon in the trainer, for weights that its models declare as fused (gate and up of experts):
  /// false = such a weight is stepped as the one matrix that it is stored as. Absent: true.
  std::optional<bool> split_fused = std::nullopt;
  bool operator==(const OptimizerRule&) const = default;
};

}  // namespace tessera
