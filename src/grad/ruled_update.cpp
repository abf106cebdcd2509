#include "grad/ruled_update.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/text/wildcard.h"
#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

using Contracts = std::vector<const GradContract*>;

bool matches_any_of(const std::string& pattern, const Contracts& contracts) {
  return std::ranges::any_of(contracts, [&](const auto* one) { return matches(pattern, *one); });
}

void check_number(std::string_view source, std::string_view key,
                  const std::optional<double>& value) {
  TESSERA_CHECK(!value || (std::isfinite(*value) && *value >= 0), ErrorKind::kConfig, source, ".",
                key, ": found ", value.value_or(0), ", expected a finite number, at least 0");
}

}  // namespace

RuledUpdate ruled_update(const std::vector<OptimizerRule>& rules, const GradContract& contract) {
  RuledUpdate ruled;
  int number = 0;
  for (const OptimizerRule& rule : rules) {
    ++number;
    const auto pattern =
        std::ranges::find_if(rule.match, [&](const auto& each) { return matches(each, contract); });
    if (pattern == rule.match.end()) continue;
    const auto take = [&](std::string_view key, const auto& value) {
      if (!value) return;
      ruled.reason += concat(ruled.reason.empty() ? "" : "; ", "[optimizer] rule ", number, " (",
                             *pattern, "): ", key, " ", *value);
    };
    take("lr_scale", rule.lr_scale);
    take("weight_decay", rule.weight_decay);
    if (rule.split_fused) {
      take("split_fused", std::optional(*rule.split_fused ? "true" : "false"));
    }
    if (rule.lr_scale) ruled.lr_scale = *rule.lr_scale;
    if (rule.weight_decay) ruled.weight_decay = rule.weight_decay;
    if (rule.split_fused) ruled.split_fused = rule.split_fused;
  }
  return ruled;
}

void check_optimizer_rules(const std::vector<OptimizerRule>& rules, const Contracts& contracts) {
  int number = 0;
  for (const OptimizerRule& rule : rules) {
    ++number;
    const std::string source = concat("optimizer.rule[", number, "]");
    TESSERA_CHECK(!rule.match.empty() && (rule.lr_scale || rule.weight_decay || rule.split_fused),
                  ErrorKind::kConfig, source, ": found ",
                  rule.match.empty() ? "no pattern" : "a pattern alone",
                  ", expected match and lr_scale, weight_decay or split_fused");
    check_number(source, "lr_scale", rule.lr_scale);
    check_number(source, "weight_decay", rule.weight_decay);
    for (const std::string& pattern : rule.match) {
      TESSERA_CHECK(matches_any_of(pattern, contracts), ErrorKind::kContract,
                    unmatched(source + ".match", in_quotes(pattern)),
                    "; correct it or take it out of the rule");
    }
  }
}

std::vector<OptimizerRule> rules_for(const std::vector<OptimizerRule>& rules,
                                     const Contracts& contracts) {
  auto kept = rules;
  for (OptimizerRule& rule : kept) {
    std::erase_if(rule.match,
                  [&](const auto& pattern) { return !matches_any_of(pattern, contracts); });
  }
  std::erase_if(kept, [](const OptimizerRule& rule) { return rule.match.empty(); });
  return kept;
}

void resolve_ruled(GradContract& contract, const std::vector<OptimizerRule>& rules) {
  if (!contract.trainable) return;
  const auto ruled = ruled_update(rules, contract);
  if (ruled.reason.empty()) return;
  std::string& reason = contract.reason(ContractField::kDecay);
  if (ruled.weight_decay) {
    contract.decays = *ruled.weight_decay > 0;
    reason = ruled.reason;
  } else {
    reason += concat("; ", ruled.reason);
  }
}

}  // namespace tessera::grad
