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
  std::optional<double> lr_scale;      ///< times the learning rate of the step; at least 0
  std::optional<double> weight_decay;  ///< in the place of the optimizer's, also over no_decay
  bool operator==(const OptimizerRule&) const = default;
};

}  // namespace tessera
