// What the rules of an optimizer make of one parameter. Pure. Next: tessera/optimizer_rule.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/contract.h"
#include "tessera/optimizer_rule.h"

namespace tessera::grad {

struct RuledUpdate {
  double lr_scale = 1.0;
  std::optional<double> weight_decay;  ///< none = no rule says
  std::optional<bool> split_fused;     ///< the same
  std::string reason;                  ///< "rule 2 (*norm): weight_decay 0"; "" where none matches
};
RuledUpdate ruled_update(const std::vector<OptimizerRule>& rules, const GradContract& contract);

/// Errors: kConfig for a rule that asks for nothing or for numbers below 0 or not finite; kContract
/// for a pattern that matches none of the parameters (frozen ones count: check_no_decay).
void check_optimizer_rules(const std::vector<OptimizerRule>& rules,
                           const std::vector<const GradContract*>& contracts);

/// The same rules where only `contracts` are here, as in a stage of a pipeline: patterns that match
/// none of them are left out. The whole model's were checked.
std::vector<OptimizerRule> rules_for(const std::vector<OptimizerRule>& rules,
                                     const std::vector<const GradContract*>& contracts);

/// GradContract::decays as the rules say, and the reason of all that they say. Rules are checked.
void resolve_ruled(GradContract& contract, const std::vector<OptimizerRule>& rules);

}  // namespace tessera::grad
