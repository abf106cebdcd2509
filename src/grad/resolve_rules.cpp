#include "grad/resolve_rules.h"

#include <algorithm>

#include "base/text/wildcard.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

bool matches_any_name(const std::string& pattern, const std::string& name,
                      const std::vector<std::string>& aliases) {
  return matches_name(pattern, name) ||
         std::any_of(aliases.begin(), aliases.end(),
                     [&](const std::string& alias) { return matches_name(pattern, alias); });
}

template <class T>
void take(std::optional<Setting<T>>& into, const std::optional<T>& asked,
          const std::string& reason) {
  if (asked) into = Setting<T>{*asked, reason};
}

void check_dtype(const std::optional<DType>& dtype, const std::string& key) {
  TESSERA_CHECK(!dtype || is_arithmetic(*dtype), ErrorKind::kContract, key, ": found ",
                to_string(*dtype), ", expected float32, bfloat16, float16 or float64; change ",
                key);
}

void check_rule(const PrecisionRule& rule, const std::string& where) {
  TESSERA_CHECK(!rule.match.empty(), ErrorKind::kContract, where,
                ": found no pattern, expected at least one; set match");
  for (const std::string& pattern : rule.match) {
    TESSERA_CHECK(is_dotted_pattern(pattern), ErrorKind::kContract, where, ": found the pattern \"",
                  pattern, "\", expected components between single dots; change match");
  }
  check_dtype(rule.param_dtype, where + " param_dtype");
  check_dtype(rule.reduce_dtype, where + " reduce_dtype");
  check_dtype(rule.storage_dtype, where + " storage_dtype");
  check_dtype(rule.accumulate_dtype, where + " accumulate_dtype");
  check_dtype(rule.grad_dtype, where + " grad_dtype");
  const bool pinned_lower = rule.pin.value_or(false) && rule.param_dtype &&
                            !represents(*rule.param_dtype, DType::kFloat32);
  TESSERA_CHECK(!pinned_lower, ErrorKind::kContract, where, " (", rule.match.front(),
                "): found pin = true with param_dtype = ", to_string(*rule.param_dtype),
                ", expected float32 or wider; leave one of them out");
}

}  // namespace

bool is_arithmetic(DType dtype) { return is_floating(dtype) && !is_float8(dtype); }

std::optional<std::string> wider_accumulator(DType accumulate, DType reduce) {
  if (represents(accumulate, reduce)) return std::nullopt;
  return concat("expected ", to_string(reduce), " or wider, to hold every value of reduce_dtype ",
                to_string(reduce));
}

void check_policy(const PrecisionPolicy& policy) {
  check_dtype(policy.param_dtype, "[precision] param_dtype");
  check_dtype(policy.reduce_dtype, "[precision] reduce_dtype");
  check_dtype(policy.storage_dtype, "[precision] storage_dtype");
  check_dtype(policy.accumulate_dtype, "[precision] accumulate_dtype");
  check_dtype(policy.final_dtype, "[precision] final_dtype");
  check_dtype(policy.output_dtype, "[precision] output_dtype");
  for (std::size_t index = 0; index < policy.rules.size(); ++index) {
    check_rule(policy.rules[index], concat("[[precision.rule]] ", index + 1));
  }
}

RuleBook::RuleBook(const std::vector<PrecisionRule>& rules, const char* source)
    : rules_(rules), source_(source) {
  for (const PrecisionRule& rule : rules) matched_.emplace_back(rule.match.size(), false);
}

Asked RuleBook::ask(const std::string& name, const std::vector<std::string>& aliases) {
  ++tensors_;
  names_.push_back(name);
  names_.insert(names_.end(), aliases.begin(), aliases.end());
  Asked asked;
  for (std::size_t index = 0; index < rules_.size(); ++index) {
    const PrecisionRule& rule = rules_[index];
    std::string reason;
    for (std::size_t p = 0; p < rule.match.size(); ++p) {
      if (!matches_any_name(rule.match[p], name, aliases)) continue;
      matched_[index][p] = true;
      if (reason.empty()) reason = concat("rule ", index + 1, " (", rule.match[p], ")");
    }
    if (reason.empty()) continue;
    take(asked.param_dtype, rule.param_dtype, reason);
    take(asked.reduce_dtype, rule.reduce_dtype, reason);
    take(asked.storage_dtype, rule.storage_dtype, reason);
    take(asked.accumulate_dtype, rule.accumulate_dtype, reason);
    take(asked.grad_dtype, rule.grad_dtype, reason);
    take(asked.pin, rule.pin, reason);
    take(asked.widen, rule.widen, reason);
    take(asked.frozen, rule.frozen, reason);
  }
  return asked;
}

void RuleBook::check_all_matched(const std::vector<std::string>& elsewhere) const {
  for (std::size_t index = 0; index < rules_.size(); ++index) {
    for (std::size_t p = 0; p < matched_[index].size(); ++p) {
      if (matched_[index][p]) continue;
      const std::string& pattern = rules_[index].match[p];
      if (std::ranges::find(elsewhere, pattern) != elsewhere.end()) continue;
      const std::optional<std::string> close = closest_name(pattern, names_);
      throw Error(
          ErrorKind::kContract,
          concat(unmatched(concat(source_, " ", index + 1), in_quotes(pattern),
                           concat(", which matches none of ", tensors_, " parameters and buffers"),
                           "at least one match"),
                 close ? concat(" (nearest name: ", *close, ")") : "",
                 "; correct match or leave the pattern out"));
    }
  }
}

}  // namespace tessera::grad
