#include "train/precision/precision_groups.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "tessera/error.h"

namespace tessera::train {
namespace {

std::vector<std::string> components_of(const std::string& name) {
  std::vector<std::string> components;
  std::istringstream text(name);
  for (std::string one; std::getline(text, one, '.');) components.push_back(one);
  return components;
}

/// "model.norm" of "model.norm.weight".
std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

/// The role of a parameter in the model: the child of its layer, or the module outside of layers,
/// where the description says nothing better.
std::string role_of(const models::ParameterSpec& row, const std::set<std::string>& norms) {
  if (row.part == models::ModelPart::kVision) return "vision";
  if (row.part == models::ModelPart::kRouter) return "router";
  if (row.part == models::ModelPart::kExperts) return "experts";
  if (norms.contains(module_of(row.name))) return "norms";
  const auto components = components_of(row.name);
  if (row.layer) {
    const auto number = std::ranges::find(components, std::to_string(*row.layer));
    if (components.end() - number > 1) return *(number + 1);
  }
  if (row.decay == models::DecayClass::kEmbedding) return "embedding";
  return components.size() > 1 ? components[components.size() - 2] : row.name;
}

/// Whether a pattern matches the parameter by any of its names.
bool matches(const std::string& pattern, const GradContract& contract) {
  return matches_name(pattern, contract.name) ||
         std::ranges::any_of(contract.aliases, [&](const std::string& alias) {
           return matches_name(pattern, alias);
         });
}

/// Every run of components of a name, short ones first. Numbers alone say nothing.
std::vector<std::string> patterns_of(const std::string& name) {
  const auto components = components_of(name);
  std::vector<std::string> patterns;
  for (std::size_t size = 1; size <= components.size(); ++size) {
    for (std::size_t begin = 0; begin + size <= components.size(); ++begin) {
      std::string pattern = components[begin];
      for (std::size_t i = begin + 1; i < begin + size; ++i) pattern += "." + components[i];
      const bool is_number = pattern.find_first_not_of("0123456789.") == std::string::npos;
      if (!is_number) patterns.push_back(std::move(pattern));
    }
  }
  return patterns;
}

/// The fewest patterns that `parameters` are found to need, each by the first of them that the ones
/// before leave: of its patterns that match nothing of `others` the one that matches most.
std::vector<std::string> patterns_for(const std::vector<std::size_t>& parameters,
                                      const std::vector<std::size_t>& others,
                                      const std::vector<GradContract>& contracts) {
  std::vector<std::string> chosen;
  auto left = parameters;
  while (!left.empty()) {
    std::string best;
    std::ptrdiff_t most = 0;
    for (const auto& pattern : patterns_of(contracts[left.front()].name)) {
      const auto is_matched = [&](std::size_t at) { return matches(pattern, contracts[at]); };
      if (std::ranges::any_of(others, is_matched)) continue;
      const auto count = std::ranges::count_if(left, is_matched);
      if (count <= most) continue;
      best = pattern;
      most = count;
    }
    TESSERA_INVARIANT(most > 0, "no pattern matches one parameter alone");
    std::erase_if(left, [&](std::size_t at) { return matches(best, contracts[at]); });
    chosen.push_back(std::move(best));
  }
  return chosen;
}

}  // namespace

std::vector<PrecisionGroup> precision_groups(const std::vector<models::ParameterSpec>& table,
                                             const std::vector<GradContract>& wide,
                                             const std::vector<GradContract>& narrow) {
  std::map<std::string, const models::ParameterSpec*> row_of;
  std::set<std::string> norms;
  for (const auto& row : table) {
    row_of.emplace(row.name, &row);
    if (row.decay == models::DecayClass::kNorm) norms.insert(module_of(row.name));
  }
  std::vector<PrecisionGroup> groups;
  for (std::size_t at = 0; at < wide.size(); ++at) {
    if (wide[at].compute == narrow[at].compute) continue;
    const auto row = row_of.find(wide[at].name);
    TESSERA_INVARIANT(row != row_of.end(), "a contract that no description has");
    const std::string role = role_of(*row->second, norms);
    auto group = std::ranges::find(groups, role, &PrecisionGroup::name);
    if (group == groups.end()) group = groups.insert(groups.end(), {.name = role});
    group->parameters.push_back(at);
    group->numel += wide[at].numel();
    if (wide[at].trainable) group->trained_numel += wide[at].numel();
  }
  for (auto& group : groups) {
    std::vector<std::size_t> others;
    for (const auto& other : groups) {
      if (&other == &group) continue;
      others.insert(others.end(), other.parameters.begin(), other.parameters.end());
    }
    group.match = patterns_for(group.parameters, others, wide);
  }
  return groups;
}

}  // namespace tessera::train
