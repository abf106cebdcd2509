#include "fsdp/contracts.h"

#include <algorithm>
#include <set>

#include "layout/model_plan.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Every unit whose module uses a parameter of `owner` now needs `ancestor`, where it has moved.
void lend(Unit& ancestor, Unit& owner) {
  if (&owner == &ancestor) return;
  if (std::find(owner.needs.begin(), owner.needs.end(), &ancestor) == owner.needs.end()) {
    owner.needs.push_back(&ancestor);
  }
}

/// Moves bucket `index` of `unit`, but for the parameters in `stay`.
void move_bucket(Unit& ancestor, Unit& unit, std::size_t index,
                 const std::set<const Parameter*>& stay) {
  const bool had_values = unit.has_values();
  auto taken = unit.take_bucket(index);
  std::vector<std::unique_ptr<Parameter>> move;
  std::vector<std::unique_ptr<Parameter>> keep;
  for (auto& parameter : taken) {
    (stay.count(parameter.get()) > 0 ? keep : move).push_back(std::move(parameter));
  }
  for (const auto& parameter : move) {
    for (const auto& leaf : parameter->leaves) unit.borrowed.push_back(leaf);
  }
  unit.add(std::move(keep));
  ancestor.add(std::move(move));
  if (had_values) unit.set_has_values();
  lend(ancestor, unit);
}

}  // namespace

void require_built(const GradContract& contract) {
  TESSERA_CHECK(contract.trainable || contract.frozen_as == FrozenAs::kShard, ErrorKind::kConfig,
                "parameter ", contract.name, ": found frozen = \"replicate\" (",
                contract.reason(ContractField::kTrainable),
                "), expected \"shard\"; whole frozen parameters are not yet built");
}

ReductionPlan data_reductions(const Mesh& mesh, std::optional<double> divide_factor) {
  ReductionPlan plan;
  const auto ranks = [&](std::string_view name) { return mesh.size_of(name); };
  for (const auto name : {axis::kShard, axis::kContext}) {
    if (ranks(name) > 1) plan.shard_axes.emplace_back(name);
  }
  if (ranks(axis::kReplicate) > 1) plan.replica_axes.emplace_back(axis::kReplicate);
  plan.divide_factor = divide_factor.value_or(
      static_cast<double>(ranks(axis::kShard) * ranks(axis::kContext) * ranks(axis::kReplicate)));
  return plan;
}

std::vector<GradContract> contracts_of(const std::vector<FoundParameter>& parameters,
                                       const Mesh& mesh, const PrecisionPolicy& policy,
                                       const ShardOptions& options) {
  const auto canonical = [&](const std::string& path) {
    if (options.canonical_name) return options.canonical_name(path);
    return options.name.empty() ? path : options.name + "." + path;
  };
  std::vector<ParameterMeta> metas;
  for (const auto& p : parameters) {
    metas.push_back(p.meta);
    metas.back().name = canonical(p.meta.name);
    for (auto& alias : metas.back().aliases) alias = canonical(alias);
  }
  if (options.contracts == nullptr) {
    auto contracts = resolve_contracts(metas, policy, data_reductions(mesh, options.divide_factor));
    for (const auto& contract : contracts) require_built(contract);
    return contracts;
  }
  std::vector<GradContract> contracts;
  for (const auto& meta : metas) {
    const auto& name = meta.name;
    const auto found = std::find_if(
        options.contracts->begin(), options.contracts->end(), [&](const auto& contract) {
          return contract.name == name ||
                 std::find(contract.aliases.begin(), contract.aliases.end(), name) !=
                     contract.aliases.end();
        });
    TESSERA_CHECK(found != options.contracts->end(), ErrorKind::kContract, "parameter ", name,
                  ": found no contract, expected one of those resolved for the model");
    TESSERA_CHECK(found->shape == meta.shape, ErrorKind::kContract, "parameter ", name,
                  ": found another shape than its contract's");
    require_built(*found);
    contracts.push_back(*found);
  }
  return contracts;
}

std::vector<std::unique_ptr<Parameter>> make_parameters(
    const std::vector<FoundParameter>& found, const std::vector<GradContract>& contracts) {
  std::vector<std::unique_ptr<Parameter>> parameters;
  for (std::size_t i = 0; i < found.size(); ++i) {
    auto parameter = std::make_unique<Parameter>();
    parameter->contract = contracts[i];
    parameter->leaves = found[i].leaves;
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

void move_shared(Unit& ancestor, const std::vector<Unit*>& below) {
  // What the ancestor itself uses of a unit below, and what units below use of each other.
  std::set<const Parameter*> shared;
  for (const auto& leaf : ancestor.borrowed) shared.insert(leaf->owner);
  for (const auto* unit : below) {
    for (const auto& leaf : unit->borrowed) shared.insert(leaf->owner);
  }
  for (auto* unit : below) {
    if (unit == &ancestor) continue;
    for (std::size_t index = 0; index < unit->buckets().size();) {
      std::set<const Parameter*> stay;
      bool moves = false;
      for (const auto& p : unit->parameters()) {
        if (p->bucket != index) continue;
        if (shared.count(p.get()) > 0) {
          moves = true;
        } else {
          stay.insert(p.get());
        }
      }
      if (!moves) {
        ++index;
        continue;
      }
      move_bucket(ancestor, *unit, index, stay);
      // What stayed is a new bucket at the end; it moves nothing.
      index = 0;
    }
  }
  for (auto* unit : below) {
    for (const auto& leaf : unit->borrowed) {
      if (leaf->owner->unit == &ancestor) lend(ancestor, *unit);
    }
  }
  std::erase_if(ancestor.borrowed,
                [&](const auto& leaf) { return leaf->owner->unit == &ancestor; });
}

void move_small(Unit& ancestor, const std::vector<Unit*>& below, std::int64_t bytes) {
  if (bytes <= 0) return;
  std::vector<std::unique_ptr<Parameter>> moved;
  for (auto* unit : below) {
    for (std::size_t index = 0; index < unit->buckets().size();) {
      if (!layout::is_small(unit->buckets()[index]->plan(), bytes)) {
        ++index;
        continue;
      }
      for (auto& parameter : unit->take_bucket(index)) {
        for (const auto& leaf : parameter->leaves) unit->borrowed.push_back(leaf);
        moved.push_back(std::move(parameter));
      }
      lend(ancestor, *unit);
    }
  }
  if (!moved.empty()) ancestor.add(std::move(moved));
}

}  // namespace tessera::fsdp
