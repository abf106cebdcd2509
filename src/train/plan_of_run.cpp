#include "train/plan_of_run.h"

#include <algorithm>
#include <map>

#include "base/hash.h"
#include "base/text/wildcard.h"
#include "grad/contract_key.h"
#include "layout/alignment.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

/// Sets the pins of parameters or buffers; whether any is matched.
template <class Meta>
bool pin(const std::string& pattern, std::optional<std::string> Meta::* member,
         std::vector<Meta>& metas) {
  bool any = false;
  for (Meta& meta : metas) {
    if (!matches_name(pattern, meta.name)) continue;
    any = true;
    if (!(meta.*member)) meta.*member = pattern;
  }
  return any;
}

void apply(const std::vector<std::string>& patterns,
           std::optional<std::string> ParameterMeta::* member,
           std::optional<std::string> BufferMeta::* of_buffer, std::string_view list,
           const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters,
           std::vector<BufferMeta>& buffers) {
  for (const std::string& pattern : patterns) {
    const bool in_parameters = pin(pattern, member, parameters);
    const bool any = pin(pattern, of_buffer, buffers) || in_parameters;
    TESSERA_CHECK(any, ErrorKind::kContract,
                  unmatched(concat("model family ", family.model_type), in_quotes(pattern),
                            concat(" in its ", list, ", which matches none of ", parameters.size(),
                                   " parameters"),
                            "at least one"),
                  "; this table of Tessera's is wrong, please report it");
  }
}

}  // namespace

void apply_pins(const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters,
                std::vector<BufferMeta>& buffers) {
  constexpr const char* kStrict = "_keep_in_fp32_modules_strict";
  const auto strictly = [&](const std::vector<std::string>& patterns) {
    apply(patterns, &ParameterMeta::strict_pin, &BufferMeta::strict_pin, kStrict, family,
          parameters, buffers);
  };
  const auto there = [&](std::string_view pattern) {
    return std::ranges::any_of(
        parameters, [&](const ParameterMeta& meta) { return matches_name(pattern, meta.name); });
  };
  if (!family.pins.strict_of_routers || there(family.router_module)) strictly(family.pins.strict);
  if (std::ranges::any_of(family.pins.routers, there)) strictly(family.pins.routers);
  if (std::ranges::any_of(family.pins.states, there)) {
    for (const std::string& pattern : family.pins.states) {
      TESSERA_INVARIANT(pin(pattern, &ParameterMeta::state_pin, parameters), pattern,
                        " of a layer with a state matches nothing");
    }
  }
  apply(family.pins.under_float16, &ParameterMeta::pin16, &BufferMeta::pin16,
        "_keep_in_fp32_modules", family, parameters, buffers);
}

namespace {

/// Which unit a parameter belongs to: 0 = the root, n = the n-th of the description.
class UnitNumbers {
 public:
  explicit UnitNumbers(const models::ModelDescription& model) {
    std::map<std::string, std::size_t> numbers;
    for (const std::string& name : model.units) numbers.emplace(name, numbers.size() + 1);
    for (const auto& parameter : model.parameters) {
      const auto unit = numbers.find(parameter.unit);
      number_of_.emplace(parameter.name, unit == numbers.end() ? 0 : unit->second);
    }
  }
  std::size_t of(const std::string& parameter) const { return number_of_.at(parameter); }

 private:
  std::map<std::string, std::size_t> number_of_;
};

}  // namespace

std::vector<UnitMeta> units_of(const models::ModelDescription& model,
                               const std::vector<ParameterMeta>& parameters) {
  const UnitNumbers numbers(model);
  std::vector<UnitMeta> units(1);
  for (const std::string& name : model.units) {
    units.emplace_back();
    units.back().name = name;
    units.back().nested = true;
  }
  for (UnitMeta& unit : units) unit.casts_inputs = false;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    units[numbers.of(parameters[i].name)].parameters.push_back(i);
  }
  return units;
}

layout::PlanOptions plan_options(const MeshShapes& mesh, BucketsOn where) {
  layout::PlanOptions options;
  options.alignment_bytes =
      where == BucketsOn::kHost ? layout::kHostAlignment : layout::kDeviceAlignment;
  options.ranks = mesh.size_of(axis::kShard) * mesh.size_of(axis::kContext);
  options.mesh = mesh;
  return options;
}

layout::ModelPlan plan_model(const models::ModelDescription& model,
                             const std::vector<GradContract>& contracts, const MeshShapes& mesh,
                             BucketsOn where) {
  const UnitNumbers numbers(model);
  layout::UnitItems root;
  std::vector<layout::UnitItems> inner;
  for (const std::string& name : model.units) inner.push_back({name, {}});
  for (const GradContract& contract : contracts) {
    const std::size_t unit = numbers.of(contract.name);
    auto& items = unit == 0 ? root.items : inner[unit - 1].items;
    items.push_back(plan_item(contract));
  }
  return layout::plan_model(root, inner, plan_options(mesh, where), kMergeBelowBytes);
}

std::uint64_t stages_hash(const std::vector<std::uint64_t>& plans) {
  if (plans.size() == 1) return plans.front();
  Hasher hasher;
  hasher.add(std::string_view("plans of stages 1"));
  for (const std::uint64_t plan : plans) hasher.add(plan);
  return hasher.digest();
}

}  // namespace tessera::train
