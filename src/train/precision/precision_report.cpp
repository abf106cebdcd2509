#include "train/precision/precision_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/text/alike.h"
#include "base/text/count_text.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

std::string worst_text(const WorstError& worst, const std::vector<std::string>& names) {
  if (worst.error == 0) return "0";
  return concat(number_text(worst.error), " (", names[worst.parameter], ")");
}

/// The largest error of all parameters, held to the bound or not.
WorstError largest(const ParameterErrors& errors) {
  return worst_error(errors, std::vector<bool>(errors.size(), true));
}

void print_noise(std::ostream& out, const WhatIfReport& report) {
  out << "noise: sums in another order move gradients in float32 by at most "
      << worst_text(largest(report.table.wide_noise), report.names)
      << ",\n  and errors in bfloat16 by at most "
      << worst_text(largest(report.table.narrow_noise), report.names)
      << "; roundings that\n  change where a group is widened make errors grow by at most "
      << worst_text(largest(noise_of(report.table)), report.names) << '\n';
  const auto held = held_parameters(report.table, report.bound);
  for (std::size_t p = 0; p < held.size(); ++p) {
    if (held[p]) continue;
    out << "  " << report.names[p]
        << " is not held to the bound: its gradient is noise in float32\n";
  }
}

/// "-0.0012", "within noise".
std::string change_text(const WhatIfReport& report, std::size_t group) {
  const auto held = held_parameters(report.table, report.bound);
  const auto before = worst_error(report.table.narrow, held);
  const auto after = worst_error(report.table.widened[group], held);
  const double change = after.error - before.error;
  const double noise = noise_of(report.table)[before.parameter];
  if (!(std::abs(change) > noise)) return "within noise";
  return concat(change > 0 ? "+" : "", number_text(change));
}

void print_groups(std::ostream& out, const WhatIfReport& report) {
  const auto held = held_parameters(report.table, report.bound);
  std::size_t widest = 5;
  for (const auto& group : report.groups) widest = std::max(widest, group.name.size());
  const auto width = static_cast<int>(widest) + 2;
  const auto row = [&](const std::string& name, const auto&... cells) {
    out << "  " << std::left << std::setw(width) << name << std::right;
    ((out << std::setw(14) << cells), ...);
    out << '\n';
  };
  out << "\nworst error with a group in float32 and all others in bfloat16, and the reverse:\n";
  row("group", "parameters", "elements", "float32", "change", "bfloat16");
  for (std::size_t g = 0; g < report.groups.size(); ++g) {
    const auto& group = report.groups[g];
    row(group.name, group.parameters.size(), group.numel,
        number_text(worst_error(report.table.widened[g], held).error), change_text(report, g),
        number_text(worst_error(report.table.narrowed[g], held).error));
  }
  row("all", "", "", "0", "", number_text(worst_error(report.table.narrow, held).error));
  if (report.wire) {
    out << "  float32 with reduce_dtype bfloat16: "
        << worst_text(worst_error(report.wire->errors, held), report.names) << '\n';
  } else {
    out << "  reduce_dtype: nothing is rounded on the wire of this layout, so that float32 stays\n";
  }
}

void print_routing(std::ostream& out, const WhatIfReport& report) {
  if (report.choices == 0) return;
  if (report.routing_is_imposed) {
    out << "\nexperts: chosen as the batch file says, in every policy\n";
    return;
  }
  out << "\nexperts: of " << report.choices << " choices at least " << report.narrow.moved_choices
      << " differ with all in bfloat16, " << report.verified.moved_choices
      << " with the policy below; a token that goes to another expert moves the\n"
         "  gradients of both as no rounding does (--impose-routing holds the choices of the batch "
         "file)\n";
}

/// Errors of parameters that differ by the number of their layer as one line, the largest of them.
struct FoldedErrors {
  std::string name;
  std::int64_t count = 0;
  double narrow = 0, found = 0;
};
std::vector<FoldedErrors> folded(const WhatIfReport& report) {
  std::vector<FoldedErrors> lines;
  for (std::size_t p = 0; p < report.names.size(); ++p) {
    const auto layer = layer_name(report.names[p]);
    const auto name = layer ? concat(layer->before, "*", layer->after) : report.names[p];
    auto line = std::ranges::find(lines, name, &FoldedErrors::name);
    if (line == lines.end()) line = lines.insert(lines.end(), {.name = name});
    ++line->count;
    line->narrow = std::max(line->narrow, report.narrow.errors[p]);
    line->found = std::max(line->found, report.verified.errors[p]);
  }
  return lines;
}

void print_parameters(std::ostream& out, const WhatIfReport& report) {
  const auto lines = folded(report);
  std::size_t widest = 9;
  for (const auto& line : lines) widest = std::max(widest, line.name.size());
  const auto width = static_cast<int>(widest) + 2;
  out << "\nerror of each gradient, of layers the largest:\n  " << std::left << std::setw(width)
      << "parameter" << std::right << std::setw(8) << "layers" << std::setw(16) << "all bfloat16"
      << std::setw(16) << "policy below" << '\n';
  for (const auto& line : lines) {
    out << "  " << std::left << std::setw(width) << line.name << std::right << std::setw(8)
        << line.count << std::setw(16) << number_text(line.narrow) << std::setw(16)
        << number_text(line.found) << '\n';
  }
  out << "  " << std::left << std::setw(width) << "loss" << std::right << std::setw(24)
      << number_text(report.narrow.loss_error) << std::setw(16)
      << number_text(report.verified.loss_error) << '\n';
}

std::string activations_text(const PolicyCost& cost) {
  std::string text;
  for (const auto& [dtype, units] : cost.activations) {
    text += concat(text.empty() ? "" : ", ", dtype, " in ", count_text(units, "unit"));
  }
  return text;
}

void print_cost(std::ostream& out, const std::string& name, const PolicyCost& cost) {
  out << "  " << name << ": parameters unsharded " << size_text(cost.unsharded_bytes)
      << ", gradients on the wire " << size_text(cost.gradient_bytes) << "; computes "
      << activations_text(cost);
  if (cost.activation_bytes) out << "; activations " << size_text(*cost.activation_bytes);
  if (cost.sent_bytes) out << ", sends " << size_text(*cost.sent_bytes);
  out << '\n';
}

void print_needed(std::ostream& out, const WhatIfReport& report) {
  for (const auto& needed : report.found.needed) {
    out << "# without " << report.groups[needed.group].name
        << " in float32: " << worst_text(needed.without, report.names)
        << (needed.is_within_noise ? ", a difference within noise" : "") << '\n';
  }
}

Json error_json(double error) { return std::isfinite(error) ? Json(error) : Json(); }

Json errors_json(const std::vector<std::string>& names, const ParameterErrors& errors) {
  Json json = Json::object();
  for (std::size_t p = 0; p < names.size(); ++p) json[names[p]] = error_json(errors[p]);
  return json;
}

Json policy_json(const WhatIfReport& report, const MeasuredPolicy& policy) {
  Json json{{"loss", error_json(policy.loss)}, {"loss_error", error_json(policy.loss_error)}};
  if (report.choices > 0) json["moved_choices_at_least"] = policy.moved_choices;
  json["errors"] = errors_json(report.names, policy.errors);
  return json;
}

Json cost_json(const PolicyCost& cost) {
  const auto optional = [](const std::optional<std::int64_t>& bytes) {
    return bytes ? Json(*bytes) : Json();
  };
  return {{"unsharded_bytes", cost.unsharded_bytes},
          {"gradient_bytes", cost.gradient_bytes},
          {"units_by_dtype", cost.activations},
          {"activation_bytes_of_rank", optional(cost.activation_bytes)},
          {"sent_bytes_of_rank", optional(cost.sent_bytes)}};
}

Json rule_json(const PrecisionRule& rule) {
  Json json{{"match", rule.match}};
  if (rule.param_dtype) json["param_dtype"] = to_string(*rule.param_dtype);
  if (rule.reduce_dtype) json["reduce_dtype"] = to_string(*rule.reduce_dtype);
  return json;
}

Json found_json(const WhatIfReport& report) {
  Json rules = Json::array();
  for (const auto& rule : report.precision.rule) rules.push_back(rule_json(rule));
  Json needed = Json::array();
  for (const auto& one : report.found.needed) {
    needed.push_back({{"group", report.groups[one.group].name},
                      {"error_without", error_json(one.without.error)},
                      {"parameter", report.names[one.without.parameter]},
                      {"is_within_noise", one.is_within_noise}});
  }
  Json json{{"is_within_bound", report.is_within_bound()},
            {"is_all_float32", report.found.is_all_wide()},
            {"param_dtype", to_string(*report.precision.param_dtype.dtype)},
            {"reduce_dtype", to_string(*report.precision.reduce_dtype.dtype)},
            {"rule", rules},
            {"config", policy_lines(report.precision)},
            {"float32_groups", needed},
            {"is_cheapest_by_activations_too", report.costs.have_activations},
            {"cost", cost_json(report.found_cost)}};
  json.update(policy_json(report, report.verified));
  return json;
}

void print_found(std::ostream& out, const WhatIfReport& report) {
  const auto held = held_parameters(report.table, report.bound);
  const std::string bound = number_text(report.bound);
  if (report.found.is_all_wide()) {
    out << "\nno policy of these groups is within " << bound << " but float32:\n\n";
  } else if (report.is_within_bound()) {
    out << "\ncheapest policy found within " << bound << ", its errors measured: "
        << worst_text(worst_error(report.verified.errors, held), report.names) << "\n\n";
  } else {
    out << "\nthe policy found was within " << bound << ", but not when it was run again: "
        << worst_text(worst_error(report.verified.errors, held), report.names) << "\n\n";
  }
  print_needed(out, report);
  out << policy_lines(report.precision) << "\ncost:\n";
  print_cost(out, "all float32", report.wide_cost);
  print_cost(out, "all bfloat16", report.narrow_cost);
  print_cost(out, "this policy", report.found_cost);
  if (!report.costs.have_activations) {
    out << "the cheapest was looked for by bytes of parameters alone: activations of every group "
           "were not counted\n";
  }
}

}  // namespace

PolicyCost cost_of(const ModelContract& contract) {
  PolicyCost cost;
  for (const auto& one : contract.parameters) {
    cost.unsharded_bytes += one.compute.payload_bytes(one.numel());
    if (one.trainable) cost.gradient_bytes += one.numel() * size_of(one.reduce);
  }
  for (const auto& unit : contract.units) {
    if (unit.activation) ++cost.activations[std::string(to_string(*unit.activation))];
  }
  return cost;
}

GroupCosts group_costs(const PolicyCost& narrow, const std::vector<PolicyCost>& alone) {
  GroupCosts costs{.have_activations = narrow.activation_bytes &&
                                       std::ranges::all_of(alone, [](const PolicyCost& cost) {
                                         return cost.activation_bytes.has_value();
                                       })};
  for (const PolicyCost& cost : alone) {
    const std::int64_t more =
        costs.have_activations ? *cost.activation_bytes - *narrow.activation_bytes : 0;
    costs.bytes.push_back(cost.unsharded_bytes - narrow.unsharded_bytes +
                          std::max<std::int64_t>(0, more));
  }
  return costs;
}

bool WhatIfReport::is_within_bound() const {
  return worst_error(verified.errors, held_parameters(table, bound)).error <= bound;
}

std::string policy_lines(const PrecisionConfig& precision) {
  std::ostringstream out;
  out << "[precision]\nparam_dtype = \"" << to_string(*precision.param_dtype.dtype)
      << "\"\nreduce_dtype = \"" << to_string(*precision.reduce_dtype.dtype) << "\"\n";
  for (const auto& rule : precision.rule) {
    std::vector<std::string> quoted;
    for (const auto& pattern : rule.match) quoted.push_back(in_quotes(pattern));
    out << "\n[[precision.rule]]\nmatch = [" << joined(quoted) << "]\n";
    if (rule.param_dtype) out << "param_dtype = \"" << to_string(*rule.param_dtype) << "\"\n";
    if (rule.reduce_dtype) out << "reduce_dtype = \"" << to_string(*rule.reduce_dtype) << "\"\n";
  }
  return out.str();
}

std::string to_text(const WhatIfReport& report) {
  std::ostringstream out;
  out << "precision what-if: " << count_text(std::ssize(report.names), "gradient") << " of "
      << count_text(report.rows, "row") << " of " << count_text(report.tokens, "token") << " on "
      << count_text(report.ranks, "rank") << ", " << report.passes
      << " passes; error = |g - g32| / |g32| compared with all in float32\n";
  print_noise(out, report);
  print_groups(out, report);
  print_routing(out, report);
  print_parameters(out, report);
  print_found(out, report);
  return out.str();
}

std::string to_json(const WhatIfReport& report) {
  Json candidates = Json::array();
  const auto add = [&](const std::string& group, const char* dtype, const MeasuredPolicy& policy) {
    Json json{{"group", group}, {"param_dtype", dtype}};
    json.update(policy_json(report, policy));
    candidates.push_back(std::move(json));
  };
  for (std::size_t g = 0; g < report.groups.size(); ++g) {
    add(report.groups[g].name, "float32", report.widened[g]);
    add(report.groups[g].name, "bfloat16", report.narrowed[g]);
  }
  Json groups = Json::array();
  for (const auto& group : report.groups) {
    groups.push_back({{"name", group.name},
                      {"match", group.match},
                      {"parameters", group.parameters.size()},
                      {"numel", group.numel}});
  }
  Json json{
      {"bound", report.bound},
      {"rows", report.rows},
      {"tokens", report.tokens},
      {"ranks", report.ranks},
      {"passes", report.passes},
      {"choices", report.choices},
      {"routing_is_imposed", report.routing_is_imposed},
      {"float32", {{"loss", error_json(report.wide_loss)}, {"cost", cost_json(report.wide_cost)}}},
      {"bfloat16", policy_json(report, report.narrow)},
      {"groups", groups},
      {"candidates", candidates}};
  json["bfloat16"]["cost"] = cost_json(report.narrow_cost);
  if (report.wire) json["bfloat16_on_the_wire"] = policy_json(report, *report.wire);
  json["noise"] = {{"float32", errors_json(report.names, report.table.wide_noise)},
                   {"bfloat16", errors_json(report.names, report.table.narrow_noise)}};
  json["policy"] = found_json(report);
  return json.dump(2) + "\n";
}

}  // namespace tessera::train
