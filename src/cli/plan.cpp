// Prints the plan of a run's steps before it starts: what a rank takes and whether it fits, the
// choices and their reasons, and with --actions when units are gathered, kept, resharded and
// reduced. --check says whether a plan out of a file is valid and belongs to this run. Nothing is
// trained, no weight is read.
#include <torch/version.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "capture/plan_json.h"
#include "capture/plan_text.h"
#include "capture/planner.h"
#include "capture/recompute_pass.h"
#include "capture/region_blocks.h"
#include "capture/simulate_plan.h"
#include "check/report.h"
#include "cli/arguments.h"
#include "cli/contract_text.h"
#include "cli/planned_machine.h"
#include "cli/program_end.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/context_of_run.h"
#include "train/contract_of_run.h"
#include "train/data/config_paths.h"
#include "train/data/data_files.h"
#include "train/dry/dry_batches.h"
#include "train/dry/dry_step.h"
#include "train/dry/plan_memory.h"
#include "train/dry/step_traffic.h"
#include "train/expert_balance.h"
#include "train/hf/model_source.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"
#include "train/planned_steps.h"
#include "train/step_rates.h"

namespace tessera::cli {
namespace {

/// A run as it would be for this many ranks.
struct PlannedStep {
  train::Config config;
  ParallelDims dims;
  train::ModelSource source;
  ModelContract contract;
  layout::ModelPlan buckets;
  train::ExpertLoads loads = {};
  train::PlanMemory memory = {};
  check::Machine machine = {};  ///< as the options describe it
  bool is_off = false;          ///< compile.mode of the configuration, planned as if it were "plan"

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

/// A plan is of whole micro-batches: fewer rows a rank than one has are another run's.
void require_whole_micro_batches(const train::Config& config, const ParallelDims& dims) {
  const auto local = config.training.local_batch_size.value_or(1);
  const auto stepped = train::stepped_config(config, dims).training.local_batch_size.value_or(1);
  TESSERA_CHECK(stepped == local, ErrorKind::kConfig, "training.global_batch_size: found ",
                config.training.global_batch_size, ", expected at least ",
                local * dims.data_ranks(), " (local_batch_size ", local, " x ", dims.data_ranks(),
                " data rank(s))");
}

PlannedStep planned_step(const PlanArguments& arguments) {
  PlannedStep step;
  step.machine = machine_of(arguments.machine);
  auto& config = step.config;
  config = train::open_as("CONFIG.toml", [&] { return train::load_config(arguments.config_file); });
  apply(arguments.overrides, config);
  take_device(arguments.machine, config);
  const int stages = config.parallelism.pipeline_parallel_degree;
  TESSERA_CHECK(
      !train::has_schedule(config), ErrorKind::kConfig,
      stages > 1 ? "parallelism.pipeline_parallel_degree: found " : "pipeline.schedule: found ",
      stages > 1 ? concat(stages, ", expected 1")
                 : concat(config.pipeline.schedule, ", expected none on one rank"),
      ": the steps of a pipeline have the plan of its schedule; tessera "
      "schedule draws that, and inspect --contract has its memory");
  auto& mode = config.compile.mode;
  step.is_off = mode == train::CompileChoice::kOff;
  if (step.is_off) mode = train::CompileChoice::kPlan;
  train::validate(config, train::Verb::kContract);
  train::require_relative_paths(config, arguments.config_file, train::Verb::kContract);
  config = train::with_context_parts(std::move(config));
  const int world = arguments.world ? *arguments.world : train::ranks_to_spawn(config.parallelism);
  step.dims = train::resolve_parallelism(config.parallelism, world);
  require_whole_micro_batches(config, step.dims);
  config.model.path = train::newest_checkpoint(config.model.path, "model.path");
  step.source = train::open_as(train::model_key(config.model),
                               [&] { return train::open_model(config.model, config.lora); });
  train::check_rows_of_files(config, step.source);
  step.contract = train::resolve_model(step.source, config, step.dims);
  step.buckets = train::plan_model(step.source.description, step.contract.parameters,
                                   train::mesh_shape(step.dims), train::buckets_here(config));
  step.loads = train::read_expert_loads(arguments.expert_loads, step.source.spec);
  step.memory = train::plan_memory(config, step.source, step.dims, step.loads);
  return step;
}

/// Prints the dtypes of a gradient on its way: layers that are alike on one line.
void print_dtypes(const ModelContract& contract) {
  std::cout
      << "\ndtypes of gradients (raw: of the kernel's result, the compute dtype or a wider one)\n";
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

/// Prints what activations take, as the run of the profile counted them.
void print_blocks(const capture::PlanFile& file, const capture::PlanProblem& problem) {
  const auto bytes =
      capture::most_blocks(problem.profile, problem.record, file.plan.choices.recompute);
  if (!bytes) return;
  std::cout << "blocks of replayed regions, of these: at most " << *bytes << " bytes ("
            << size_text(*bytes) << ")\n";
}

/// The most memory that a rank takes, by kind, and the memory that it may take.
struct Totals {
  std::int64_t fixed = 0;  ///< the same for every plan
  std::int64_t gathered = 0;
  std::optional<std::int64_t> activations = {};
  std::int64_t all() const { return fixed + gathered + activations.value_or(0); }
};

Totals totals_of(const capture::PlanFile& file, const capture::PlanProblem& problem,
                 const train::PlanMemory& held) {
  Totals totals{.fixed = held.others + held.state,
                .gathered = fsdp::peak_gathered_bytes(file.plan)};
  if (problem.activations) {
    totals.activations = capture::most_activations(*problem.activations, file.plan.record,
                                                   file.plan.choices.recompute, problem.blocks);
  }
  return totals;
}

std::string whether_fits(std::int64_t room, const Totals& totals) {
  return concat(fits_text(room, totals.all()), totals.activations ? "" : ", without activations");
}

void print_memory(const Totals& totals, const PlannedStep& step,
                  const train::MachineMemory& machine, std::string_view memory_from) {
  std::cout << "  memory of a rank: at most " << size_text(totals.all()) << ": gathered "
            << size_text(totals.gathered);
  if (totals.activations) {
    std::cout << ", activations " << size_text(*totals.activations);
  } else {
    std::cout << check::kWithoutActivations;
  }
  std::cout << ", fixed " << size_text(totals.fixed) << '\n'
            << train::kernels_line(train::computes_on(step.config));
  const auto& budget = step.config.compile.memory_budget;
  if (budget) {
    const auto counted = counted_as(*budget, machine);
    std::cout << "  compile.memory_budget " << whether_fits(budget_bytes(*budget, machine), totals)
              << (counted.empty() ? "" : concat(" (", counted, ")")) << '\n';
  }
  if (step.machine.memory) {
    std::cout << "  " << memory_from << ' ' << whether_fits(*step.machine.memory, totals) << '\n';
  } else if (!budget) {
    std::cout << "  whether that fits: set compile.memory_budget, or give --device-memory\n";
  }
}

/// The bytes of a step that follows the plan.
train::StepTraffic traffic_of(const capture::PlanFile& file, const PlannedStep& step) {
  train::Config follows = train::stepped_config(step.config, step.dims);
  follows.compile.plan = to_json(file);
  follows.compile.memory_budget.reset();
  follows.compile.passes.reset();
  const MeshShapes mesh = train::mesh_shape(step.dims);
  const int rank = train::busiest_rank(step.loads, mesh, 0);
  const auto stepped =
      train::dry_step(follows, step.source, rank, mesh.size(), {.loads = step.loads});
  auto traffic =
      train::most_traffic(step.config, step.source, mesh, {follows, rank, stepped, step.loads});
  traffic.matrices = train::sent_of_matrices(step.config, step.source.description.parameters,
                                             step.contract.parameters, step.buckets, /*rank=*/0);
  return traffic;
}

/// Prints FLOPs and bytes, and seconds where a profile is given or the machine has a time.
void print_costs(const capture::PlanFile& file, const capture::PlanProblem& problem,
                 const PlannedStep& step, std::string_view rates_from) {
  const auto run = step.run();
  const auto traffic = traffic_of(file, step);
  if (const auto flops = step_flops(run, file.plan)) {
    std::cout << "  computed by a rank: " << train::flops_text(flops->all) << " a step";
    if (flops->again > 0) {
      std::cout << ", of which " << train::flops_text(flops->again) << " recomputes activations";
    }
    std::cout << '\n';
  }
  std::cout << "  sent by a rank: " << size_text(traffic.total()) << " a step"
            << (traffic.of_tokens ? "" : ", without activations and tokens (set training.seq_len)");
  // inspect reads no profile, so it cannot show the bytes of a plan that one has shaped.
  if (traffic.of_tokens && problem.profile.is_assumed) {
    std::cout << " (tessera inspect --contract" << (step.is_off ? " --compile.mode plan" : "")
              << " says of what)";
  }
  std::cout << '\n';
  const auto context = context_of_run(step.config, step.source.spec, step.dims, step.contract,
                                      train::computes_on(step.config));
  if (context) std::cout << costs_text(*context);
  if (!problem.profile.is_assumed) {
    std::cout << time_line("the profile",
                           capture::simulate(file.plan, problem.profile, problem.micro_batches));
  }
  if (rates_from.empty()) return;
  std::cout << time_line(rates_from, step_at(step.machine, run, file.plan, traffic));
}

/// Prints the memory of a rank at each place of the step.
void print_curve(const capture::PlanFile& file, const capture::PlanProblem& problem,
                 const Totals& totals) {
  const auto step = capture::simulate(file.plan, problem.profile, problem.micro_batches);
  std::cout << "\ngathered memory of a rank, place by place: at most " << step.peak_bytes
            << " bytes (" << size_text(step.peak_bytes) << ")\n";
  std::cout << picture(step) << step.gathers << " gathers and " << step.reductions
            << " reductions a step\n";
  if (totals.activations) {
    const auto again = std::ranges::count_if(file.plan.choices.recompute, [](RecomputeMode mode) {
      return mode != RecomputeMode::kNone;
    });
    std::cout << "activations of a micro-batch: at most " << *totals.activations << " bytes ("
              << size_text(*totals.activations) << "), with " << count_text(again, "unit")
              << " recomputed\nin all: at most " << totals.all() << " bytes ("
              << size_text(totals.all()) << ") a rank\n";
  }
  if (problem.replays) print_blocks(file, problem);
}

/// Options of the output.
struct Shown {
  std::string rates_from = {};  ///< empty: no time
  std::string memory_from = {};
  bool actions = false;
  train::MachineMemory machine = {};
};

void print_plan_of_step(const capture::PlanFile& file, const capture::PlanProblem& problem,
                        const capture::Chosen& chosen, const PlannedStep& step,
                        const Shown& shown) {
  const auto& of = file.made_for;
  const Totals totals = totals_of(file, problem, step.memory);
  std::cout << "plan of a step of " << count_text(of.micro_batches, "micro-batch") << " on "
            << count_text(of.world, "rank") << ", form " << step.config.compile.form << ", hash "
            << file.plan.hash() << "\n";
  if (step.is_off) {
    std::cout << "  the run follows no plan (compile.mode = \"off\"): this is its step with "
                 "--compile.mode plan\n";
  }
  print_memory(totals, step, shown.machine, shown.memory_from);
  print_costs(file, problem, step, shown.rates_from);
  std::cout << "\nchosen:\n" << choices_text(file.plan, chosen);
  for (const auto& note : chosen.notes) std::cout << "note: " << note << '\n';
  print_curve(file, problem, totals);
  if (!shown.actions) return;
  std::cout << '\n' << to_text(file.plan, chosen, of.micro_batches);
  print_dtypes(step.contract);
}

/// Findings are printed, all else that is wrong with the file is refused.
int check_plan(const std::string& path, const capture::MadeFor& made_for,
               capture::PlanProblem problem) {
  const auto file = train::open_as("--check", [&] {
    return capture::parse_plan(read_text_file(path, capture::kMostPlanBytes), shown(path));
  });
  capture::require_made_for(file, made_for, shown(path));
  capture::require_plan_of(file.plan, problem.record, problem.units, shown(path));
  if (!problem.memory_budget) problem.memory_budget = file.memory_budget;  // it was made for that
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
  const auto machine = train::memory_here(
      run.config, step.dims.world_size(),
      {.device_bytes = step.machine.memory, .ranks_per_host = step.machine.ranks_per_host});
  auto options = compile_options(run, step.memory, machine);
  if (arguments.profile) {
    options.profile = train::open_as("--profile", [&] {
      auto text = read_text_file(*arguments.profile, capture::kMostProfileBytes);
      capture::parse_profile(text, shown(*arguments.profile));
      return text;
    });
  }
  const auto planning = train::planning_of(options);
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
  const bool has_time =
      gives_time(step.machine, arguments.machine, run.config, step.dims.world_size());
  print_plan_of_step(file, problem, chosen, step,
                     {.rates_from = has_time ? rates_from(step.machine, arguments.machine) : "",
                      .memory_from = memory_from(step.machine, arguments.machine),
                      .actions = arguments.actions,
                      .machine = machine});
  return kDone;
}

}  // namespace tessera::cli
