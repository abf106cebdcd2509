#include "train/plan_of_step.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "capture/recompute_pass.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/context_of_run.h"

namespace tessera::train {
namespace {

/// Images come in batches only; which of these have some, a header alone does not say.
bool may_have_images(const Config& config) {
  return config.data.path.size() == 1 && config.data.path.front().ends_with(".safetensors");
}

/// Names of the parameters that lie in each unit, small ones of others among the root's.
std::vector<std::set<std::string_view>> held(const layout::ModelPlan& plan) {
  std::vector<std::set<std::string_view>> names;
  for (const auto& unit : plan.units) {
    auto& of = names.emplace_back();
    for (const auto& item : unit.items) of.insert(item.name);
  }
  return names;
}

/// By unit: which layer of the text it is.
std::vector<std::optional<std::int64_t>> layers_of(const RunOfPlan& run) {
  std::map<std::string_view, std::int64_t> numbers;
  for (const auto& parameter : run.description.parameters) {
    if (parameter.layer && !parameter.unit.empty()) {
      numbers.emplace(parameter.unit, *parameter.layer);
    }
  }
  std::vector<std::optional<std::int64_t>> layers;
  for (const auto& unit : run.plan.units) {
    const auto found = numbers.find(unit.plan.name);
    layers.push_back(found == numbers.end() ? std::nullopt : std::optional(found->second));
  }
  return layers;
}

}  // namespace

std::int64_t micro_batches_of(const RunOfPlan& run) {
  const auto& training = run.config.training;
  const std::int64_t rows = training.global_batch_size > 0
                                ? training.global_batch_size
                                : training.local_batch_size.value_or(1) * run.dims.data_ranks();
  return resolve_micro_batches(run.config, Verb::kContract, rows, run.dims.data_ranks());
}

std::vector<fsdp::PlanUnit> plan_units(const RunOfPlan& run) {
  const auto names = held(run.plan);
  const auto layers = layers_of(run);
  std::vector<fsdp::PlanUnit> units;
  for (const auto& planned : run.plan.units) {
    fsdp::PlanUnit unit;
    unit.name = std::string(unit_label(planned.plan.name));
    for (const auto& bucket : planned.plan.buckets) {
      // One rank that computes in the storage dtype has its shard for it.
      const bool is_shard = bucket.ranks == 1 && bucket.key.storage == bucket.key.compute;
      unit.gathers = unit.gathers || !is_shard;
      if (!is_shard) unit.bytes += layout::gathered_bytes(bucket);
      unit.reduces = unit.reduces || bucket.key.trainable;
    }
    const bool owns = std::ranges::any_of(run.description.parameters, [&](const auto& parameter) {
      return !units.empty() && parameter.unit == planned.plan.name && parameter.tied_to.empty() &&
             names.front().contains(parameter.name);
    });
    if (owns) unit.owners = {0};
    if (layers[units.size()]) {
      unit.recompute_by = run.config.activation_checkpoint.mode ? fsdp::RecomputeBy::kUser
                                                                : fsdp::RecomputeBy::kPlan;
    }
    units.push_back(std::move(unit));
  }
  return units;
}

fsdp::StepRecord step_record(const RunOfPlan& run) {
  std::map<std::string_view, bool> trains;
  for (const auto& contract : run.contract.parameters) {
    trains.emplace(contract.name, contract.trainable);
    for (const auto& alias : contract.aliases) trains.emplace(alias, contract.trainable);
  }
  // In the order of the modules, which is the forward's.
  std::map<std::string_view, bool> reached;
  std::set<std::string_view> left_out;
  bool any = false;
  for (const auto& parameter : run.description.parameters) {
    if (parameter.part == models::ModelPart::kVision && !may_have_images(run.config)) {
      left_out.insert(parameter.unit);
      continue;
    }
    const auto found = trains.find(parameter.name);
    any = any || (found != trains.end() && found->second);
    reached[parameter.unit] = any;
  }
  fsdp::Trace trace;
  fsdp::Reach reach;
  for (fsdp::UnitId unit = 0; unit < run.plan.units.size(); ++unit) {
    const std::string_view name = run.plan.units[unit].plan.name;
    if (unit > 0 && left_out.contains(name)) continue;
    if (unit > 0) trace.exits.push_back(trace.units.size());
    trace.units.push_back(unit);
    reach.push_back(unit == 0 ? any : reached[name]);
  }
  trace.exits.push_back(0);
  trace.checkpoints.resize(trace.units.size());
  return {.stages = {{.parts = {trace}, .reached = {reach}}}};
}

fsdp::PlanChoices eager_choices(const RunOfPlan& run, const fsdp::StepRecord& record) {
  std::vector<bool> resharded(run.plan.units.size(), run.config.parallelism.reshard_after_forward);
  resharded.front() = false;
  const bool every = run.config.training.sync_every_micro_batch || run.config.compile.form == 2;
  const auto reduce = every ? fsdp::ReduceAt::kEveryBackward : fsdp::ReduceAt::kLastBackward;
  auto choices = fsdp::eager_choices(record, resharded, reduce, fsdp::PlanOrder::kOneAfterTheOther);
  const auto layers = layers_of(run);
  for (fsdp::UnitId unit = 0; unit < layers.size(); ++unit) {
    if (layers[unit]) choices.recompute[unit] = run.config.activation_checkpoint.of_layers();
  }
  return choices;
}

capture::MadeFor made_for(const RunOfPlan& run, std::string torch) {
  const auto& training = run.config.training;
  return {.model = concat(layout::hash(run.plan)),
          .world = run.dims.world_size(),
          .torch = std::move(torch),
          .micro_batches = micro_batches_of(run),
          .tokens = training.local_batch_size.value_or(1) * training.seq_len.value_or(0),
          .context = context_text(run.dims)};
}

capture::Planning planning_of(const CompileOptions& options) {
  return open_as("compile.plan", [&] { return capture::planning_of(options); });
}

fsdp::StepPlan first_plan(const RunOfPlan& run, const capture::Planning& planning) {
  const auto record = step_record(run);
  return plan_step(planning, record, plan_units(run), eager_choices(run, record),
                   fsdp::PlanOrder::kOneAfterTheOther);
}

std::int64_t budget_bytes(const MemoryBudget& budget, const MachineMemory& machine) {
  if (budget.share == 0.0) return budget.bytes;
  return static_cast<std::int64_t>(budget.share * machine.memory /
                                   static_cast<double>(machine.local_ranks));
}

Config with_budget_in_bytes(Config config, const MachineMemory& machine) {
  auto& budget = config.compile.memory_budget;
  if (budget) budget = MemoryBudget{.bytes = budget_bytes(*budget, machine)};
  return config;
}

std::string counted_as(const MemoryBudget& budget, const MachineMemory& machine) {
  if (budget.share == 0.0) return "";
  return concat(
      budget.share * 100.0, "% of the ", size_text(static_cast<std::int64_t>(machine.memory)),
      " of ", machine.of,
      machine.local_ranks > 1 ? concat(", shared by ", machine.local_ranks, " ranks") : "");
}

CompileOptions compile_options(const RunOfPlan& run, const PlanMemory& memory,
                               const MachineMemory& machine) {
  const auto& section = run.config.compile;
  CompileOptions options;
  if (section.mode == CompileChoice::kOff) return options;
  options.mode = section.mode == CompileChoice::kReplay ? CompileMode::kReplay : CompileMode::kPlan;
  options.form = section.form;
  options.passes = section.passes;
  options.plan = section.plan;
  options.micro_batches = micro_batches_of(run);
  options.activations = memory.activations;
  if (!section.memory_budget) return options;
  const auto& budget = *section.memory_budget;
  const auto bytes = budget_bytes(budget, machine);
  const auto fixed = memory.state + memory.others;
  capture::PlanProblem problem;
  problem.record = step_record(run);
  problem.units = plan_units(run);
  problem.eager = eager_choices(run, problem.record);
  problem.form = static_cast<capture::Form>(section.form);
  if (options.activations) {
    problem.activations = capture::activations_of(*options.activations, problem.units);
  }
  const auto least = fixed + capture::least_bytes(problem, section.passes);
  std::vector<std::string> how;
  if (bytes >= 1024) how.push_back(size_text(bytes));
  if (auto counted = counted_as(budget, machine); !counted.empty()) how.push_back(counted);
  const auto found = joined(how);
  TESSERA_CHECK(bytes >= least, ErrorKind::kConfig, "compile.memory_budget: found ", bytes,
                " bytes a rank", found.empty() ? "" : concat(" (", found, ")"),
                ", expected at least ", exact_size_text(least), ", of which ",
                exact_size_text(fixed), " are there with any plan,  ",
                exact_size_text(memory.state),
                " of them optimizer state (tessera inspect --contract has the table), and the "
                "others the least that is gathered in form ",
                section.form,
                " and that activations take; raise it, or lower what a rank holds (more ranks "
                "share it: parallelism.data_parallel_shard_degree; less is trained: lora.rank, "
                "model.freeze; optimizer.name SGD keeps less)");
  options.memory_budget = bytes - fixed;
  return options;
}

namespace {

fsdp::StepPlan eager_plan(const RunOfPlan& run) {
  const auto record = step_record(run);
  auto choices = eager_choices(run, record);
  // Without [compile] its form has no effect.
  choices.reduce = run.config.training.sync_every_micro_batch ? fsdp::ReduceAt::kEveryBackward
                                                              : fsdp::ReduceAt::kLastBackward;
  return make_plan(record, plan_units(run), choices, fsdp::PlanOrder::kOneAfterTheOther);
}

}  // namespace

fsdp::StepPlan plan_of_steps(const RunOfPlan& run, const PlanMemory& memory,
                             const MachineMemory& machine) {
  if (run.config.compile.mode == CompileChoice::kOff) return eager_plan(run);
  try {
    return first_plan(run, planning_of(compile_options(run, memory, machine)));
  } catch (const Error&) {
    return eager_plan(run);
  }
}

std::vector<RecomputeMode> modes_of_layers(const RunOfPlan& run, const fsdp::StepPlan& plan) {
  std::vector<RecomputeMode> modes(static_cast<std::size_t>(run.spec.num_hidden_layers),
                                   RecomputeMode::kNone);
  const auto layers = layers_of(run);
  for (std::size_t unit = 0; unit < layers.size(); ++unit) {
    if (!layers[unit]) continue;
    modes.at(static_cast<std::size_t>(*layers[unit])) = plan.choices.recompute[unit];
  }
  return modes;
}

}  // namespace tessera::train
