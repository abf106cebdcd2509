// The plan of a run's steps before it starts: what is gathered, kept, given back and reduced when,
// and why; or whether a plan out of a file is this run's and holds. Nothing is trained, no weight
// is read.
#include <torch/version.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "capture/offload_pass.h"
#include "capture/plan_json.h"
#include "capture/plan_text.h"
#include "capture/planner.h"
#include "capture/recompute_pass.h"
#include "capture/region_blocks.h"
#include "capture/simulate_plan.h"
#include "cli/arguments.h"
#include "cli/contract_text.h"
#include "cli/program_end.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/data/config_paths.h"
#include "train/expert_balance.h"
#include "train/hf/model_source.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"
#include "train/planned_steps.h"

namespace tessera::cli {
namespace {

/// A run as it would be for this many ranks.
struct PlannedStep {
  train::Config config;
  ParallelDims dims;
  train::ModelSource source;
  ModelContract contract;
  layout::ModelPlan buckets;

  train::RunOfPlan run() const {
    return {.config = config,
            .spec = source.spec,
            .description = source.description,
            .dims = dims,
            .contract = contract,
            .plan = buckets,
            .aux_loss_coef = train::aux_loss_coef(config.model.aux_loss_coef, source.spec)};
  }
};

PlannedStep planned_step(const PlanArguments& arguments) {
  PlannedStep step;
  auto& config = step.config;
  config = train::open_as("CONFIG.toml", [&] { return train::load_config(arguments.config_file); });
  apply(arguments.overrides, config);
  const int stages = config.parallelism.pipeline_parallel_degree;
  TESSERA_CHECK(stages == 1, ErrorKind::kConfig, "parallelism.pipeline_parallel_degree: found ",
                stages,
                ", expected 1: the steps of a pipeline have the plan of its schedule; tessera "
                "schedule draws that, and inspect --contract has its memory");
  auto& mode = config.compile.mode;
  if (mode == train::CompileChoice::kOff) mode = train::CompileChoice::kPlan;
  train::validate(config, train::Verb::kContract);
  train::require_relative_paths(config, arguments.config_file, train::Verb::kContract);
  const int world = arguments.world ? *arguments.world : train::ranks_to_spawn(config.parallelism);
  step.dims = train::resolve_parallelism(config.parallelism, world);
  config.model.path = train::newest_checkpoint(config.model.path, "model.path");
  step.source = train::open_as(train::model_key(config.model),
                               [&] { return train::open_model(config.model, config.lora); });
  step.contract = train::resolve_model(step.source, config, step.dims);
  step.buckets = train::plan_model(step.source.description, step.contract.parameters,
                                   train::mesh_shape(step.dims), train::buckets_here(config));
  return step;
}

/// What a gradient is on its way: layers that are alike on one line.
void print_dtypes(const ModelContract& contract) {
  std::cout
      << "\ngradients: raw as its kernel gives it, in the compute dtype unless that is wider; "
         "nothing below depends on it\n";
  std::size_t widest = 0;
  const auto shown = folded(contract);
  for (const auto& one : shown.parameters) widest = std::max(widest, one.name.size());
  const auto width = static_cast<int>(widest) + 2;
  std::cout << "  " << std::left << std::setw(width) << "parameter" << std::setw(10) << "raw"
            << std::setw(10) << "grad" << std::setw(10) << "slot" << std::setw(10) << "wire"
            << "final\n";
  for (const auto& one : shown.parameters) {
    std::cout << "  " << std::setw(width) << one.name;
    if (one.trainable) {
      std::cout << std::setw(10) << to_string(one.compute.dtype) << std::setw(10)
                << (one.grad ? to_string(*one.grad) : "raw") << std::setw(10)
                << to_string(one.accumulate) << std::setw(10) << to_string(one.reduce)
                << to_string(one.final) << '\n';
    } else {
      std::cout << "frozen\n";
    }
  }
  std::cout << std::right;
}

/// Of what activations take; as the profile's run counted them.
void print_blocks(const capture::PlanFile& file, const capture::PlanProblem& problem) {
  const auto bytes =
      capture::most_blocks(problem.profile, problem.record, file.plan.choices.recompute);
  if (!bytes) return;
  std::cout << "blocks of replayed regions, of these: at most " << *bytes << " bytes ("
            << size_text(*bytes) << ")\n";
}

void print_step(const capture::PlanFile& file, const capture::PlanProblem& problem,
                const train::HeldBytes& held) {
  const auto fixed = held.others + (problem.state ? 0 : held.state);
  const auto step = capture::simulate(file.plan, problem.profile, problem.micro_batches);
  std::cout << "\ngathered memory of a rank, place by place: at most " << step.peak_bytes
            << " bytes (" << size_text(step.peak_bytes) << "), beside " << fixed << " bytes ("
            << size_text(fixed) << ") that are there whatever the plan is\n";
  if (problem.state) {
    const auto& offload = file.plan.choices.offload;
    std::cout << "optimizer state of a rank in memory: "
              << size_text(capture::state_in_memory(*problem.state, offload)) << " of "
              << size_text(capture::state_in_memory(*problem.state, {})) << ", that of "
              << offload.size() << " unit(s) is offloaded\n";
  }
  std::cout << picture(step) << step.gathers << " gathers and " << step.reductions
            << " reductions a step\n";
  if (problem.activations) {
    const auto& modes = file.plan.choices.recompute;
    const auto bytes =
        capture::most_activations(*problem.activations, file.plan.record, modes, problem.blocks);
    const auto again = std::ranges::count_if(
        modes, [](RecomputeMode mode) { return mode != RecomputeMode::kNone; });
    const auto all = fixed + peak_bytes(problem, file.plan);
    std::cout << "activations of a micro-batch: at most " << bytes << " bytes (" << size_text(bytes)
              << "), with " << again << " unit(s) recomputed; in all at most " << all << " bytes ("
              << size_text(all) << ") a rank\n";
  }
  if (problem.replays) print_blocks(file, problem);
  if (!problem.profile.is_assumed) {
    std::cout << std::fixed << std::setprecision(2) << "a step by the profile: " << step.step_ms
              << " ms, of which computing " << step.compute_ms << " (forwards again "
              << step.again_ms << "), waiting for gathers " << step.waited_ms << ", for reductions "
              << step.reduced_ms << ", the update and all else " << step.rest_ms << '\n'
              << std::defaultfloat << std::setprecision(6);
  }
}

void print_plan_of_step(const capture::PlanFile& file, const capture::PlanProblem& problem,
                        const capture::Chosen& chosen, const PlannedStep& step) {
  const auto& of = file.made_for;
  std::cout << "plan of a step of " << of.micro_batches << " micro-batch(es) on " << of.world
            << " rank(s), form " << step.config.compile.form << ", hash " << file.plan.hash()
            << "\n"
            << choices_text(file.plan, chosen);
  for (const auto& note : chosen.notes) std::cout << "note: " << note << '\n';
  std::cout << '\n' << to_text(file.plan, chosen, of.micro_batches);
  print_dtypes(step.contract);
  print_step(file, problem, held_bytes(step.run()));
}

/// Findings are printed, all else that is wrong with the file is refused.
int check_plan(const std::string& path, const capture::MadeFor& made_for,
               capture::PlanProblem problem) {
  const auto file = train::open_as("--check", [&] {
    return capture::parse_plan(read_text_file(path, capture::kMostPlanBytes), shown(path));
  });
  capture::require_made_for(file, made_for, shown(path));
  capture::require_plan_of(file.plan, problem.record, problem.units, shown(path));
  if (!problem.memory_budget) {
    // What the plan was made for; without a folder its budget was beside the optimizer's state.
    problem.memory_budget = file.memory_budget;
    if (file.plan.choices.offload.empty()) problem.state.reset();
  }
  auto faults = faults_of(file.plan);
  if (faults.empty()) {
    for (const auto& fault : capture::faults_in_run(problem, file.plan)) {
      faults.push_back(concat("found ", fault));
    }
  }
  for (const auto& fault : faults) std::cout << fault << '\n';
  std::cout << shown(path) << ": " << faults.size() << " findings";
  if (faults.empty()) {
    std::cout << ", at most " << fsdp::peak_gathered_bytes(file.plan) << " bytes gathered";
  }
  std::cout << '\n';
  return faults.empty() ? kDone : kFoundProblems;
}

}  // namespace

int run_plan(const PlanArguments& arguments) {
  const PlannedStep step = planned_step(arguments);
  const train::RunOfPlan run = step.run();
  auto options = compile_options(run, train::memory_here(run.config, step.dims.world_size()));
  if (arguments.profile) {
    options.profile = train::open_as("--profile", [&] {
      auto text = read_text_file(*arguments.profile, capture::kMostProfileBytes);
      capture::parse_profile(text, shown(*arguments.profile));
      return text;
    });
  }
  const auto planning = planning_of(run, options);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const auto eager = eager_choices(run, record);
  constexpr auto kOrder = fsdp::PlanOrder::kOneAfterTheOther;
  const auto problem = capture::problem_of(planning, record, units, eager, kOrder);
  capture::PlanFile file{made_for(run, TORCH_VERSION), {}, {}};
  if (arguments.check) return check_plan(*arguments.check, file.made_for, problem);
  capture::Chosen chosen;
  if (planning.given) {
    require_made_for(*planning.given, file.made_for, planning.plan_from);
    file.plan = plan_step(planning, record, units, eager, kOrder);
  } else {
    chosen = choose(problem, planning.passes);
    file.plan = make_plan(record, units, chosen.choices, kOrder);
  }
  file.memory_budget = planning.memory_budget;
  if (arguments.json) {
    std::cout << to_json(file);
    return kDone;
  }
  print_plan_of_step(file, problem, chosen, step);
  return kDone;
}

}  // namespace tessera::cli
