#include "check/carried_contracts.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/error.h"

namespace tessera::check {
namespace {

constexpr auto kLookAtPolicy =
    "look at [precision], at the layer's declaration, and at what changes the contract after it "
    "was "
    "resolved (tessera inspect --contract has the reasons)";

/// "reduce float32": the values of one parameter.
std::vector<std::string> values_of(const GradContract& contract) {
  ModelContract alone;
  alone.parameters = {contract};
  std::vector<std::string> values;
  const std::string text = to_lines(alone), head = concat("parameter ", contract.name, ' ');
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    values.push_back(line.starts_with(head) ? line.substr(head.size()) : std::move(line));
    begin = end + 1;
  }
  std::ranges::sort(values);
  return values;
}

std::string only_in(const std::vector<std::string>& these, const std::vector<std::string>& others) {
  std::string text;
  for (const std::string& value : these) {
    if (std::ranges::binary_search(others, value)) continue;
    text += concat(text.empty() ? "" : ", ", value);
  }
  return text.empty() ? "nothing more" : text;
}

bool is_in(const std::string& text, std::string_view word) {
  return text.find(word) != std::string::npos;
}

void compare(const GradContract& carried, const GradContract& resolved,
             std::vector<Finding>& findings) {
  const auto found = values_of(carried), expected = values_of(resolved);
  if (found == expected) return;
  Finding finding{.kind = FindingKind::kContract,
                  .parameter = carried.name,
                  .found = only_in(found, expected),
                  .expected = only_in(expected, found),
                  .mend = kLookAtPolicy};
  for (const auto& axis : carried.layout.axes) {
    if (is_in(finding.found + finding.expected, axis.axis)) finding.axis = axis.axis;
  }
  findings.push_back(std::move(finding));
}

/// The axes over which a gradient has to be summed: those of the data, and where it is partial.
std::set<std::string> due_axes(const GradContract& contract, const MeshShapes& mesh) {
  const bool dense = contract.layout.mesh == MeshKind::kDense;
  std::set<std::string> due;
  for (const std::string_view name :
       {axis::kReplicate, dense ? axis::kShard : axis::kExpertData, axis::kContext}) {
    if (mesh.of(contract.layout.mesh).size_of(name) > 1) due.emplace(name);
  }
  for (const AxisPlacement& one : contract.layout.axes) {
    if (one.gradient.kind == PlacementKind::kPartial) due.insert(one.axis);
  }
  return due;
}

void check_sums(const GradContract& contract, const MeshShapes& mesh,
                std::vector<Finding>& findings) {
  const std::set<std::string> due = due_axes(contract, mesh);
  std::map<std::string, int> summed;
  for (const auto* axes : {&contract.reductions.shard_axes, &contract.reductions.replica_axes}) {
    for (const std::string& name : *axes) {
      if (mesh.of(contract.layout.mesh).size_of(name) > 1) ++summed[name];
    }
  }
  const auto add = [&](const std::string& name, std::string found, std::string expected) {
    findings.push_back({.kind = FindingKind::kContract,
                        .operation = "sum of its gradient",
                        .parameter = contract.name,
                        .axis = name,
                        .found = std::move(found),
                        .expected = std::move(expected),
                        .mend = kLookAtPolicy});
  };
  for (const std::string& name : due) {
    if (summed[name] == 0) add(name, "no sum", "one, since each rank has an addend");
  }
  for (const auto& [name, count] : summed) {
    if (count > 1) add(name, concat(count, " sums"), "one");
    if (count > 0 && !due.contains(name)) {
      add(name, "a sum", "none, since its gradient is no addend there");
    }
  }
}

void check_divisors(const std::vector<GradContract>& contracts, std::vector<Finding>& findings) {
  std::map<double, int> count;
  for (const auto& one : contracts) {
    if (one.trainable) ++count[one.reductions.divide_factor];
  }
  if (count.size() < 2) return;
  const double most =
      std::ranges::max_element(count, {}, [](const auto& one) { return one.second; })->first;
  for (const auto& one : contracts) {
    if (!one.trainable || one.reductions.divide_factor == most) continue;
    findings.push_back({.kind = FindingKind::kContract,
                        .operation = "division of its gradient",
                        .parameter = one.name,
                        .found = concat(one.reductions.divide_factor),
                        .expected = concat(most, ", the factor of all other parameters"),
                        .mend = kLookAtPolicy});
  }
}

}  // namespace

std::vector<Finding> wrong_contracts(const ModelContract& carried, const ModelContract& resolved,
                                     const MeshShapes& mesh) {
  std::vector<Finding> findings;
  std::map<std::string, const GradContract*> by_name;
  for (const GradContract& one : resolved.parameters) by_name.emplace(one.name, &one);
  for (const GradContract& one : carried.parameters) {
    const auto found = by_name.find(one.name);
    if (found == by_name.end()) {
      findings.push_back({.kind = FindingKind::kContract,
                          .parameter = one.name,
                          .found = "a parameter that the model's description does not have",
                          .mend = "declare it where its layer registers it"});
      continue;
    }
    compare(one, *found->second, findings);
    if (!one.trainable) continue;
    check_sums(one, mesh, findings);
  }
  check_divisors(carried.parameters, findings);
  return findings;
}

std::vector<Finding> wrong_wires(const std::vector<SeenDtype>& seen, const ModelContract& contract,
                                 const std::vector<std::string>& units) {
  std::map<std::pair<std::string, std::string>, std::set<std::string>> due;  // by unit, what
  for (std::size_t i = 0; i < contract.parameters.size(); ++i) {
    const GradContract& one = contract.parameters[i];
    due[{units.at(i), "gather"}].emplace(to_string(one.compute.dtype));
    if (one.trainable) due[{units.at(i), "reduction"}].emplace(to_string(one.reduce));
  }
  std::vector<Finding> findings;
  std::set<std::string> known;
  for (const SeenDtype& one : seen) {
    const auto found = due.find({one.unit, one.what});
    if (found == due.end() || found->second.contains(one.dtype)) continue;
    if (!known.insert(concat(one.unit, '|', one.what, '|', one.dtype)).second) continue;
    std::string expected;
    for (const std::string& dtype : found->second)
      expected += concat(expected.empty() ? "" : " or ", dtype);
    findings.push_back({.kind = FindingKind::kDtype,
                        .operation = one.what,
                        .unit = one.unit,
                        .found = one.dtype,
                        .expected = concat(expected, ", as the contracts of its parameters say"),
                        .mend = kLookAtPolicy});
  }
  return findings;
}

}  // namespace tessera::check
