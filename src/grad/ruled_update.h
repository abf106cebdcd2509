// The update of one parameter by the rules of an optimizer. Pure. Next: tessera/optimizer_rule.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/contract.h"
#include "tessera/optimizer_rule.h"

namespace tessera::grad {

struct RuledUpdate {
  double lr_scale = 1.0;
  std::optional<double> weight_decay;  ///< none: no rule sets it
  std::optional<bool> split_fused;     ///< none: no rule sets it
  std::string reason;                  ///< "rule 2 (*norm): weight_decay 0"; "" where none matches
};
RuledUpdate ruled_update(const std::vector<OptimizerRule>& rules, const GradContract& contract);

/// Errors: kConfig for a rule that asks for nothing or for numbers below 0 or not finite; kContract
/// for a pattern that matches none of the parameters (frozen ones count: check_no_decay).
void check_optimizer_rules(const std::vector<OptimizerRule>& rules,
                           const std::vector<const GradContract*>& contracts);

/// Returns the rules for a part of the model, such as a stage of a pipeline: without patterns that
/// match none of `contracts`. The rules were checked for the whole model.
std::vector<OptimizerRule> rules_for(const std::vector<OptimizerRule>& rules,
                                     const std::vector<const GradContract*>& contracts);

/// Sets GradContract::decays by the rules, which were checked, and adds their reason.
void resolve_ruled(GradContract& contract, const std::vector<OptimizerRule>& rules);

}  // namespace tessera::grad
