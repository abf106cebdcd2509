// The plan of a run's steps before it starts: what a step scope would record, and what there is to
// choose, out of the model's description, for any number of ranks.
//
// Pure: no rank is started and nothing is allocated. The trainer's scopes record the same
// (fsdp/runtime/open_step.h), one forward of the root around its units in their order; where a run
// turns out to record something else, its plan is refused by name. Next: capture/passes.h,
// plan_of_run.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "capture/planner.h"
#include "fsdp/agreed/step_plan.h"
#include "layout/model_plan.h"
#include "layout/parallel_dims.h"
#include "models/description.h"
#include "models/model_spec.h"
#include "tessera/compile.h"
#include "tessera/model_contract.h"
#include "train/config/config.h"

namespace tessera::train {

/// A run as far as its plan goes.
struct RunOfPlan {
  const Config& config;
  const models::ModelSpec& spec;
  const models::ModelDescription& description;
  const ParallelDims& dims;
  const ModelContract& contract;
  const layout::ModelPlan& plan;
  double aux_loss_coef = 0.0;  ///< as expert_balance.h has it
};

/// In the order of `plan`, which is the runtime's.
std::vector<fsdp::PlanUnit> plan_units(const RunOfPlan& run);
/// Layers recompute inside their units, so that no unit is entered in a checkpoint. A backward
/// comes to a unit where a parameter in it or before it is trained. The vision tower is left out
/// where data.path names no batches: only these have images.
fsdp::StepRecord step_record(const RunOfPlan& run);
/// A rank's micro-batches of a step.
std::int64_t micro_batches_of(const RunOfPlan& run);
/// As the trainer opens its scopes: the root stays, units as reshard_after_forward says.
fsdp::PlanChoices eager_choices(const RunOfPlan& run, const fsdp::StepRecord& record);
/// `torch`: TORCH_VERSION.
capture::MadeFor made_for(const RunOfPlan& run, std::string torch);

/// Memory of a rank in a step in addition to gathered parameters, in bytes (plan_memory.h).
struct PlanMemory {
  std::int64_t state = 0;    ///< of the optimizer, were all of it in memory
  std::int64_t others = 0;   ///< with any plan
  std::int64_t passing = 0;  ///< of `others`: gradients of activations, an operation's memory
  /// Those of layers that are units by unit; none without training.seq_len.
  std::optional<ForwardActivations> activations = {};
};

/// capture::planning_of, whose errors name compile.plan.
capture::Planning planning_of(const CompileOptions& options);
/// The plan that the steps begin with, before costs are measured.
fsdp::StepPlan first_plan(const RunOfPlan& run, const capture::Planning& planning);

/// The memory of a machine on which `local_ranks` ranks share `memory` bytes.
struct MachineMemory {
  double memory = 0.0;
  int local_ranks = 1;
  std::string of = "this machine";  ///< whose memory it is, as messages say it
};
/// Options that describe machines other than this one.
struct AskedMemory {
  std::optional<std::int64_t> device_bytes = {};  ///< bytes of the device of each rank
  std::optional<int> ranks_per_host = {};         ///< ranks that share the memory of a host
};

/// A rank's share of a budget.
std::int64_t budget_bytes(const MemoryBudget& budget, const MachineMemory& machine);
/// A share of the machine's memory as the bytes that it is, for steps that count on another
/// machine.
Config with_budget_in_bytes(Config config, const MachineMemory& machine);
/// Explains a share: "90% of the 15.6 GiB of this machine, shared by 8 ranks"; "" for a budget in
/// bytes.
std::string counted_as(const MemoryBudget& budget, const MachineMemory& machine);
/// [compile] as the library takes it, with the activations of `memory`; of compile.memory_budget
/// what it leaves. Errors:
/// kConfig for a budget that leaves nothing, with the least in bytes.
CompileOptions compile_options(const RunOfPlan& run, const PlanMemory& memory,
                               const MachineMemory& machine);

/// The plan that the run's steps follow: the first plan of [compile]. Without one, and where
/// compile_options() refuses it, the actions of eager steps.
fsdp::StepPlan plan_of_steps(const RunOfPlan& run, const PlanMemory& memory,
                             const MachineMemory& machine);
/// The recompute mode of each layer of the text in `plan`.
std::vector<RecomputeMode> modes_of_layers(const RunOfPlan& run, const fsdp::StepPlan& plan);

}  // namespace tessera::train
