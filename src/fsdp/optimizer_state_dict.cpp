// Saves and loads an optimizer's state in whole form (tessera/state_dict.h).
#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <ranges>
#include <set>

#include "base/text/printable.h"
#include "comm/group.h"
#include "fsdp/handle.h"
#include "fsdp/load_refusals.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/runtime/whole.h"
#include "grad/torch_dtype.h"
#include "layout/local_part.h"
#include "tessera/error.h"
#include "tessera/state_dict.h"

namespace tessera {

namespace {

/// An optimizer's state, by parameter.
using StateOf = std::map<const GradContract*, OptimizerState>;

StateOf states_of(const Optimizer& optimizer) {
  StateOf states;
  for (auto& state : optimizer.state()) {
    const auto* contract = state.view.contract;
    states.emplace(contract, std::move(state));
  }
  return states;
}

/// Returns what ranks must have in common, one line for each parameter.
std::string lines_of(const ParameterState& state) {
  return concat(state.parameter, ": ", state.steps, " updates, ",
                joined(std::views::keys(state.kept), "nothing"), "\n");
}

/// Returns the state of one bucket with this name and dtype: [slice], zeros where there is none.
at::Tensor slice_of_kept(const fsdp::Unit& unit, std::size_t index, const StateOf& states,
                         const std::string& name, at::ScalarType dtype,
                         std::vector<const fsdp::Parameter*>& of) {
  const auto& bucket = *unit.buckets()[index];
  const auto slice =
      at::zeros({bucket.plan().slice_numel()}, bucket.shard().options().dtype(dtype));
  for (const auto& parameter : unit.parameters()) {
    const auto state = states.find(&parameter->contract);
    if (parameter->bucket != index || state == states.end()) continue;
    for (const auto& kept : state->second.kept) {
      if (kept.name != name || kept.values.scalar_type() != dtype) continue;
      of.push_back(parameter.get());
      if (kept.values.numel() == 0) continue;
      const auto begin = bucket.plan().offset_in_slice(parameter->placed(), bucket.rank());
      slice.narrow(0, begin, kept.values.numel()).copy_(kept.values);
    }
  }
  return slice;
}

/// Adds copies of the whole state of the bucket's parameters to `whole`, if that is not null.
void gather_kept(fsdp::Runtime& runtime, const fsdp::Unit& unit, std::size_t index,
                 const StateOf& states,
                 const std::function<std::map<std::string, at::Tensor>*(const GradContract*)>& to) {
  const auto& bucket = *unit.buckets()[index];
  std::set<std::pair<std::string, at::ScalarType>> kinds;  // all ranks have this order
  for (const auto& parameter : unit.parameters()) {
    const auto state = states.find(&parameter->contract);
    if (parameter->bucket != index || state == states.end()) continue;
    for (const auto& kept : state->second.kept) {
      kinds.emplace(kept.name, kept.values.scalar_type());
    }
  }
  for (const auto& [name, dtype] : kinds) {
    std::vector<const fsdp::Parameter*> of;
    const auto slice = slice_of_kept(unit, index, states, name, dtype, of);
    const auto flat = fsdp::whole_of(runtime, unit, bucket, slice, "optimizer state");
    for (const auto* parameter : of) {
      const auto& placed = parameter->placed();
      const auto whole =
          fsdp::whole_of(runtime, *parameter, flat.narrow(0, placed.offset, placed.numel));
      if (auto* kept = to(&parameter->contract)) kept->emplace(name, whole.clone());
    }
  }
}

}  // namespace

OptimizerStateDict optimizer_state_dict(const ShardedBase& model, const Optimizer& optimizer,
                                        StateDictKind kind) {
  constexpr auto kWhat = "optimizer_state_dict";
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(kind != StateDictKind::kSharded, ErrorKind::kUsage, kWhat,
                ": found kSharded, expected kFull or kFullOnRankZero; Optimizer::state() has what "
                "this rank holds");
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  comm::on_all_or_none(runtime.world(), kWhat,
                       [&] { fsdp::require_steps_of(model, optimizer, kWhat); });
  const auto states = states_of(optimizer);
  const fsdp::ModelNames names(model);
  OptimizerStateDict dict{optimizer.name(), {}};
  std::map<const GradContract*, std::size_t> place;
  std::string lines;
  for (const auto& state : optimizer.state()) {
    place.emplace(state.view.contract, dict.parameters.size());
    dict.parameters.push_back({names.of(*state.view.contract).front(), state.steps, {}});
    auto line = dict.parameters.back();
    for (const auto& kept : state.kept) line.kept.emplace(kept.name, at::Tensor());
    lines += lines_of(line);
  }
  runtime.agree(lines, "optimizer states", "make the same updates on every rank");
  const bool keeps = kind == StateDictKind::kFull || runtime.world().rank() == 0;
  // Units in agreed order, so that every rank gathers the same buckets one after the other.
  for (auto* unit : runtime.units()) {
    for (std::size_t index = 0; index < unit->buckets().size(); ++index) {
      gather_kept(runtime, *unit, index, states, [&](const GradContract* contract) {
        return keeps ? &dict.parameters[place.at(contract)].kept : nullptr;
      });
    }
  }
  if (!keeps) dict.parameters.clear();
  return dict;
}

namespace {

/// Adds the reasons not to load `source` into the state of its parameter.
void refuse_state(const Optimizer& optimizer, const GradContract& contract,
                  const ParameterState& source, std::vector<std::string>& refusals) {
  const auto found = [&](const auto&... words) {
    refusals.push_back(concat(source.parameter, ": found ", words...));
  };
  const std::int64_t fewest = source.kept.empty() ? 0 : 1;
  if (source.steps < fewest || source.steps > Optimizer::kMostSteps) {
    found(source.steps, " updates, expected ", fewest, " to ", Optimizer::kMostSteps);
  }
  const auto known = optimizer.kept_dtypes(contract);
  for (const auto& [name, values] : source.kept) {
    const auto expected = known.find(name);
    if (expected == known.end()) {
      found(name, ", expected only what ", optimizer.name(),
            " keeps of it: ", joined(std::views::keys(known), "nothing"));
    } else if (!fsdp::has_values(values)) {
      found(name, " without values, expected a dense tensor that is not on the meta device");
    } else if (values.sizes() != at::IntArrayRef(contract.shape)) {
      found(name, " of the shape ", values.sizes(), ", expected ", at::IntArrayRef(contract.shape));
    } else if (const auto dtype = to_scalar_type(expected->second); values.scalar_type() != dtype) {
      found(name, " in ", c10::toString(values.scalar_type()), ", expected ", c10::toString(dtype),
            " as its contract has it");
    }
  }
  if (source.steps == 0) return;
  auto due = known;
  for (const auto& state : optimizer.states_of(contract)) {
    if (state.begins == KeptTensor::Begins::kLater) due.erase(state.name);
  }
  for (const auto& name : std::views::keys(due)) {
    if (source.kept.count(name) == 0) {
      found("no ", name, " after ", source.steps, " updates, expected it with them");
    }
  }
}

/// Pairs each state to load with its parameter, and collects the reasons to refuse it.
struct LoadPlan : fsdp::LoadRefusals {
  std::vector<std::pair<const OptimizerState*, const ParameterState*>> sources;
};

LoadPlan plan_load(const fsdp::ModelNames& names, const Optimizer& optimizer,
                   const std::vector<OptimizerState>& states, const OptimizerStateDict& dict) {
  LoadPlan plan;
  if (dict.optimizer != optimizer.name()) {
    plan.refusals.push_back(concat("found the state of ", printable(dict.optimizer), ", expected ",
                                   optimizer.name(), "; make the optimizer that it is of"));
  }
  std::map<std::string, const OptimizerState*> targets;  // by every name
  for (const auto& state : states) {
    for (const auto& name : names.of(*state.view.contract)) targets.emplace(name, &state);
  }
  std::set<const OptimizerState*> taken;
  for (const auto& source : dict.parameters) {
    const auto target = targets.find(source.parameter);
    if (target == targets.end()) {
      plan.difference.unexpected.push_back(source.parameter);
      continue;
    }
    if (!taken.insert(target->second).second) plan.add_second_entry(source.parameter);
    // For another optimizer every tensor would be reported.
    if (dict.optimizer == optimizer.name()) {
      refuse_state(optimizer, *target->second->view.contract, source, plan.refusals);
    }
    plan.sources.emplace_back(target->second, &source);
  }
  for (const auto& state : states) {
    if (taken.count(&state) > 0) continue;
    plan.difference.missing.push_back(names.of(*state.view.contract).front());
  }
  return plan;
}

/// Returns the reasons not to load, as text; "" for none.
std::string objections(const LoadPlan& plan, Strict strict) {
  std::string text;
  const auto add = [&](const std::string& more) { text += concat(text.empty() ? "" : "; ", more); };
  for (const auto& refusal : plan.refusals) add(refusal);
  const auto unexpected_are = "entries that the optimizer does not step";
  for (const auto& one : plan.refused_difference(strict, unexpected_are)) add(one);
  return text;
}

/// Returns the shard's elements of the whole tensor, flat.
at::Tensor part_of_shard(const ShardView& view, const at::Tensor& whole) {
  const auto& [layout, shape] = std::tie(view.contract->layout, view.contract->shape);
  auto local = whole;
  if (!view.coordinates.empty()) {
    local = fsdp::local_part(whole, layout, shape, view.coordinates);
  }
  return local.reshape(-1).narrow(0, view.begin, view.end - view.begin);
}

}  // namespace

StateDictDifference load_optimizer_state_dict(const ShardedBase& model, Optimizer& optimizer,
                                              const OptimizerStateDict& dict, Strict strict) {
  constexpr auto kWhat = "load_optimizer_state_dict";
  const at::NoGradGuard no_grad;
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  fsdp::renew_after_failure(model);
  comm::on_all_or_none(runtime.world(), kWhat, [&] {
    fsdp::require_idle(model, kWhat);
    fsdp::require_steps_of(model, optimizer, kWhat);
  });
  const auto states = optimizer.state();
  auto plan = plan_load(fsdp::ModelNames(model), optimizer, states, dict);
  comm::on_all_or_none(runtime.world(), kWhat, [&] {
    const auto text = objections(plan, strict);
    TESSERA_CHECK(text.empty(), ErrorKind::kContract, kWhat, ": ", text,
                  "; expected every parameter that the optimizer steps once, as "
                  "optimizer_state_dict() gave it (Strict::kNo leaves out what is missing or "
                  "unexpected)");
  });
  std::string lines;
  for (const auto& [target, source] : plan.sources) lines += lines_of(*source);
  runtime.agree(lines, "optimizer states to load", "bring the same state on every rank");
  for (const auto& [target, source] : plan.sources) {
    const auto& name = target->view.contract->name;
    optimizer.forget(name);
    optimizer.set_steps(name, source->steps);
    if (source->steps == 0) continue;
    for (const auto& kept : optimizer.make_kept(name)) {
      const auto values = source->kept.find(kept.name);
      if (values == source->kept.end() || kept.values.numel() == 0) continue;
      kept.values.copy_(part_of_shard(target->view, values->second));
    }
  }
  return std::move(plan.difference);
}

}  // namespace tessera
