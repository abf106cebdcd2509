#include "fsdp/plan.h"

#include <algorithm>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/contract_key.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

const Parameter& parameter_at(const Unit& unit, std::size_t bucket, std::size_t place) {
  const auto found =
      std::find_if(unit.parameters().begin(), unit.parameters().end(), [&](const auto& parameter) {
        return parameter->bucket == bucket && parameter->place == place;
      });
  TESSERA_INVARIANT(found != unit.parameters().end(), "unit ", unit.name(), ", bucket ", bucket,
                    ": nothing at place ", place);
  return **found;
}

layout::PlannedUnit planned(const Unit& unit) {
  layout::PlannedUnit result{{unit.name(), {}}, {}};
  for (std::size_t b = 0; b < unit.buckets().size(); ++b) {
    auto plan = unit.buckets()[b]->plan();
    for (std::size_t place = 0; place < plan.parameters.size(); ++place) {
      const auto& contract = parameter_at(unit, b, place).contract;
      plan.parameters[place].parameter = result.items.size();
      result.items.push_back(plan_item(contract));
    }
    result.plan.buckets.push_back(std::move(plan));
  }
  return result;
}

}  // namespace

layout::ModelPlan plan_of(const ShardedBase& model) {
  auto& runtime = unit_of_handle(model.unit()).runtime();
  layout::ModelPlan plan{runtime.plan_options(), {}};
  for (const auto* unit : runtime.units()) plan.units.push_back(planned(*unit));
  return plan;
}

}  // namespace tessera::fsdp
