#include "fsdp/contracts.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/text/printable.h"
#include "grad/resolve_steps.h"
#include "layout/local_part.h"
#include "layout/model_plan.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Makes `unit`, whose module uses a parameter that has moved to `ancestor`, depend on `ancestor`
/// and keep it alive: the unit's handle may live longer than the ancestor's.
void depend_on(Unit& ancestor, Unit& unit) {
  if (&unit == &ancestor) return;
  if (!unit.has_owner(ancestor)) unit.owners.push_back(ancestor.shared_from_this());
}

/// Does that for the units below which use a parameter that has moved there from another unit.
void make_users_depend_on(Unit& ancestor, const std::vector<Unit*>& below) {
  for (auto* unit : below) {
    for (const auto& leaf : unit->owned_elsewhere) {
      if (leaf->owner != nullptr && leaf->owner->unit == &ancestor) depend_on(ancestor, *unit);
    }
  }
}

/// Moves the parameters of bucket `index` of `unit` to `ancestor`, except those in `stay`.
void move_bucket(Unit& ancestor, Unit& unit, std::size_t index,
                 const std::set<const Parameter*>& stay) {
  const bool had_values = unit.has_values();
  auto taken = unit.take_bucket(index);
  std::vector<std::shared_ptr<Parameter>> move;
  std::vector<std::shared_ptr<Parameter>> keep;
  for (auto& parameter : taken) {
    (stay.count(parameter.get()) > 0 ? keep : move).push_back(std::move(parameter));
  }
  for (const auto& parameter : move) {
    for (const auto& leaf : parameter->leaves) unit.owned_elsewhere.push_back(leaf);
  }
  unit.add(std::move(keep));
  ancestor.add(std::move(move));
  if (had_values) unit.set_has_values();
  depend_on(ancestor, unit);
}

}  // namespace

ReductionPlan data_reductions(const Mesh& mesh, std::optional<double> divide_factor) {
  return DataAxes(mesh.shapes(), divide_factor).dense;
}

std::string prefix_of(const std::string& path, const ShardOptions& options) {
  return options.name.empty() ? path : options.name + "." + path;
}

namespace {

std::string canonical(const std::string& path, const ShardOptions& options) {
  return options.canonical_name ? options.canonical_name(path) : prefix_of(path, options);
}

/// Requires that a contract that was resolved for the model fits this module and this mesh.
void check_fits(const GradContract& contract, const FoundParameter& found, const Mesh& mesh) {
  const auto what = concat("parameter ", contract.name);
  const auto declared = found.declared.value_or(ParameterLayout());
  TESSERA_CHECK(contract.layout == declared, ErrorKind::kContract, what, ": found the placement ",
                to_string(contract.layout), " in its contract and ", to_string(declared),
                " by its module, expected one of them; resolve the contract from what the layers "
                "declare");
  TESSERA_CHECK(contract.local_shape() == found.meta.shape, ErrorKind::kContract, what,
                ": found another shape than its contract's");
  const auto expected = reductions_of(contract.layout, DataAxes(mesh.shapes()), what);
  const auto& planned = contract.reductions;
  TESSERA_CHECK(
      planned.shard_axes == expected.shard_axes && planned.replica_axes == expected.replica_axes,
      ErrorKind::kContract, what, ": found the contract's gradient with ", to_string(planned),
      ", expected ",
      to_string(ReductionPlan{expected.shard_axes, expected.replica_axes, planned.divide_factor}),
      " on the mesh ", to_string(mesh.shapes()), "; resolve the contract for this mesh");
  const bool is_wide = size_of(contract.accumulate) >= size_of(contract.reduce);
  TESSERA_CHECK(!contract.trainable || is_wide, ErrorKind::kContract, what,
                ": found a gradient that is accumulated in ", to_string(contract.accumulate),
                " and travels in ", to_string(contract.reduce), " by its contract, expected ",
                to_string(contract.reduce), " or wider; set precision.accumulate_dtype");
}

GradContract look_up(const ParameterMeta& meta, const std::vector<GradContract>& contracts) {
  const auto found = std::ranges::find_if(contracts, [&](const auto& contract) {
    return contract.name == meta.name || std::ranges::count(contract.aliases, meta.name) > 0;
  });
  TESSERA_CHECK(found != contracts.end(), ErrorKind::kContract, "parameter ", meta.name,
                ": found no contract, expected one of those resolved for the model");
  return *found;
}

BufferContract look_up(const BufferMeta& meta, const std::vector<BufferContract>& contracts) {
  const auto found =
      std::ranges::find_if(contracts, [&](const auto& each) { return each.name == meta.name; });
  TESSERA_CHECK(found != contracts.end() && found->shape == meta.shape, ErrorKind::kContract,
                "buffer ", meta.name,
                ": found no contract for it and its shape, expected one of "
                "those resolved for the model");
  return *found;
}

}  // namespace

ModelContract contracts_of(const Found& found, const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options,
                           const std::vector<std::string>& patterns_inside) {
  std::vector<ParameterMeta> metas;
  for (const auto& p : found.parameters) {
    metas.push_back(p.meta);
    metas.back().name = canonical(p.meta.name, options);
    for (auto& alias : metas.back().aliases) alias = canonical(alias, options);
  }
  std::vector<BufferMeta> buffers;
  for (const auto& buffer : found.buffers) {
    buffers.push_back(buffer.meta);
    buffers.back().name = canonical(buffer.meta.name, options);
  }
  if (options.contracts == nullptr) {
    for (std::size_t i = 0; i < metas.size(); ++i) {
      auto& meta = metas[i];
      meta.layout = found.parameters[i].declared.value_or(ParameterLayout());
      meta.shape = layout::global_shape(meta.layout, meta.shape, concat("parameter ", meta.name));
    }
    return grad::resolve_tensors(metas, buffers, {}, policy,
                                 DataAxes(mesh.shapes(), options.divide_factor), patterns_inside);
  }
  ModelContract model;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    model.parameters.push_back(look_up(metas[i], *options.contracts));
    check_fits(model.parameters.back(), found.parameters[i], mesh);
  }
  grad::RuleBook rules(policy.rules);
  for (const auto& meta : buffers) {
    model.buffers.push_back(
        options.buffer_contracts != nullptr
            ? look_up(meta, *options.buffer_contracts)
            : grad::resolve_buffer(meta, rules.ask(meta.name), model.parameters, policy));
  }
  return model;
}

std::vector<Registered> registered_of(const Found& found, const ShardOptions& options) {
  std::vector<Registered> all;
  if (options.contracts != nullptr) return all;
  for (const auto& [path, leaf, buffer, handle] : found.places) {
    if (handle == nullptr) {
      all.push_back({canonical(path, options), leaf, buffer});
    } else if (!handle->unit()->name().empty()) {
      all.push_back({"", nullptr, {}, handle->unit()});
    } else {
      all.push_back({prefix_of(path, options), nullptr, {}, handle->unit()});
    }
  }
  return all;
}

std::optional<UnitContract> given_unit_contract(const ShardOptions& options) {
  if (options.contracts == nullptr || options.unit_contracts == nullptr) return std::nullopt;
  const auto& contracts = *options.unit_contracts;
  const auto found =
      std::ranges::find_if(contracts, [&](const auto& each) { return each.name == options.name; });
  TESSERA_CHECK(found != contracts.end(), ErrorKind::kContract, unit_label(options.name),
                ": found no contract for this unit, expected one of those resolved for the model; "
                "resolve the model with the units that are sharded");
  return *found;
}

std::vector<Buffer> make_buffers(const std::vector<FoundBuffer>& found,
                                 const std::vector<BufferContract>& contracts,
                                 const ShardOptions& options) {
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool given = options.contracts != nullptr && options.buffer_contracts != nullptr;
    buffers.push_back({found[i].meta, contracts.at(i), given, found[i].tensor});
    buffers.back().meta.name = contracts[i].name;
  }
  return buffers;
}

void check_shared_buffers(const std::vector<Unit*>& units) {
  std::map<const void*, const Buffer*> seen;
  for (auto* unit : units) {
    for (auto& buffer : unit->buffers) {
      const auto [entry, is_new] = seen.emplace(buffer.tensor.unsafeGetTensorImpl(), &buffer);
      const auto& contract = buffer.contract;
      const auto& first = entry->second->contract;
      TESSERA_CHECK(is_new || first.compute == contract.compute, ErrorKind::kContract, "buffers ",
                    first.name, " and ", contract.name, ": found one tensor that is to be ",
                    to_string(first.compute), " (", first.reason(BufferField::kCompute), ") and ",
                    to_string(contract.compute), " (", contract.reason(BufferField::kCompute),
                    "), expected one dtype; set param_dtype for both in a rule, or give each "
                    "module its own");
      if (first.storage == contract.storage) buffer.last_cast = entry->second->last_cast;
    }
  }
}

std::vector<std::shared_ptr<Parameter>> make_parameters(const std::vector<FoundParameter>& found,
                                                        const std::vector<GradContract>& contracts,
                                                        const ShardOptions& options) {
  const auto place_of = [&](const std::string& name) -> std::int64_t {
    if (options.contracts == nullptr) return -1;
    const auto one = std::ranges::find(*options.contracts, name, &GradContract::name);
    return one == options.contracts->end() ? -1 : one - options.contracts->begin();
  };
  std::vector<std::shared_ptr<Parameter>> parameters;
  for (std::size_t i = 0; i < found.size(); ++i) {
    auto parameter = std::make_shared<Parameter>();
    parameter->contract = contracts[i];
    parameter->leaves = found[i].leaves;
    parameter->place_in_model = place_of(contracts[i].name);
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

void move_shared(Unit& ancestor, const std::vector<Unit*>& below) {
  // Parameters of units below that the ancestor uses, or that units below use from each other.
  std::set<const Parameter*> shared;
  for (const auto& leaf : ancestor.owned_elsewhere) shared.insert(leaf->owner);
  for (const auto* unit : below) {
    for (const auto& leaf : unit->owned_elsewhere) shared.insert(leaf->owner);
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
      // The parameters that stayed are a new bucket at the end, from which nothing moves.
      index = 0;
    }
  }
  make_users_depend_on(ancestor, below);
  std::erase_if(ancestor.owned_elsewhere, [&](const auto& leaf) {
    return leaf->owner != nullptr && leaf->owner->unit == &ancestor;
  });
}

// layout::plan_model computes the same from values, for models that are not made; here tensors and
// the leaves of modules move, for units that other calls of fully_shard have laid out. Both use
// is_small() and plan_unit(), and a test compares their plans (plan_of_run_test).
void move_small(Unit& ancestor, const std::vector<Unit*>& below, std::int64_t bytes) {
  if (bytes <= 0) return;
  std::vector<std::shared_ptr<Parameter>> moved;
  for (auto* unit : below) {
    for (std::size_t index = 0; index < unit->buckets().size();) {
      if (!layout::is_small(unit->buckets()[index]->plan(), bytes)) {
        ++index;
        continue;
      }
      for (auto& parameter : unit->take_bucket(index)) {
        for (const auto& leaf : parameter->leaves) unit->owned_elsewhere.push_back(leaf);
        moved.push_back(std::move(parameter));
      }
      depend_on(ancestor, *unit);
    }
  }
  if (!moved.empty()) ancestor.add(std::move(moved));
  make_users_depend_on(ancestor, below);
}

}  // namespace tessera::fsdp
