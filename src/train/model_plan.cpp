#include "train/model_plan.h"

#include <map>

#include "grad/contract_key.h"
#include "models/parameter_table.h"
#include "tessera/error.h"

namespace tessera::train {

layout::ModelPlan plan_model(const models::ModelSpec& spec,
                             const std::vector<GradContract>& contracts, int shard_ranks) {
  std::map<std::string, std::string> unit_of;
  for (const auto& parameter : models::parameter_table(spec)) {
    unit_of.emplace(parameter.name, parameter.unit);
  }
  std::map<std::string, std::size_t> number_of;
  std::vector<layout::UnitItems> inner;
  for (const std::string& name : models::sharding_units(spec)) {
    number_of.emplace(name, inner.size());
    inner.push_back({name, {}});
  }
  layout::UnitItems root;
  for (const GradContract& contract : contracts) {
    const auto unit = number_of.find(unit_of.at(contract.name));
    auto& items = unit == number_of.end() ? root.items : inner[unit->second].items;
    items.push_back({contract.name, contract.numel(), key_of(contract)});
  }
  layout::PlanOptions options;
  options.ranks = shard_ranks;
  return layout::plan_model(root, inner, options, kMergeBelowBytes);
}

}  // namespace tessera::train
