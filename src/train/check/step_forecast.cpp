#include "train/check/step_forecast.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "capture/simulate_plan.h"
#include "pipeline/picture.h"
#include "pipeline/simulate.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/dry/plan_memory.h"
#include "train/dry/step_traffic.h"
#include "train/expert_balance.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/plan_of_run.h"
#include "train/planned_steps.h"
#include "train/step_rates.h"

namespace tessera::train {
namespace {

/// A run, its machine, and what was counted of it.
struct Forecast {
  const Config& config;
  const ModelSource& source;
  ParallelDims dims;
  const check::Machine& machine;
  ModelContract contract;
  MeshShapes mesh;

  double ms_to_send(std::int64_t bytes, std::int64_t messages, std::string_view axis) const {
    return train::ms_to_send(machine, mesh, bytes, messages, {axis});
  }
};

check::StepTime without_stages(const Forecast& of, const CheckedRun& checked) {
  const auto plan =
      plan_model(of.source.description, of.contract.parameters, of.mesh, buckets_here(of.config));
  const RunOfPlan run{
      .config = of.config,
      .spec = of.source.spec,
      .description = of.source.description,
      .dims = of.dims,
      .contract = of.contract,
      .plan = plan,
      .aux_loss_coef = aux_loss_coef(of.config.model.aux_loss_coef, of.source.spec)};
  const auto memory =
      memory_here(of.config, of.dims.world_size(),
                  {.device_bytes = of.machine.memory, .ranks_per_host = of.machine.ranks_per_host});
  // Without a plan to choose what is held decides nothing.
  const PlanMemory held = of.config.compile.mode == CompileChoice::kOff
                              ? PlanMemory()
                              : plan_memory(of.config, of.source, of.dims);
  const auto steps = plan_of_steps(run, held, memory);
  auto traffic = step_traffic(of.config, checked.steps.front());
  traffic.matrices = sent_of_matrices(of.config, of.source.description.parameters,
                                      of.contract.parameters, plan, 0);
  const auto step =
      capture::simulate(steps, profile_at(of.machine, run, traffic), traffic.micro_batches);
  return {.step_ms = step.step_ms,
          .compute_ms = step.compute_ms,
          .again_ms = step.again_ms,
          .waited_ms = step.waited_ms + step.reduced_ms,
          .rest_ms = step.rest_ms};
}

/// The exchanges of one micro-batch in one stage of a rank.
struct Exchanged {
  double tensor_ms = 0;                 ///< over tp and cp, half of it in its backward
  pipeline::Exchanges of_experts = {};  ///< over ep
  double experts_ms = 0;                ///< all of these
};

Exchanged exchanged_in_stage(const Forecast& of, const StepTraffic& traffic, std::size_t stages) {
  const auto tokens = traffic.of_tokens.value_or(StepTraffic::OfTokens());
  const auto parts = traffic.micro_batches * static_cast<std::int64_t>(stages);
  Exchanged found;
  found.tensor_ms =
      (of.ms_to_send(tokens.activations, traffic.messages.activations, axis::kTensor) +
       of.ms_to_send(tokens.context, traffic.messages.context, axis::kContext)) /
      static_cast<double>(parts);
  found.experts_ms = of.ms_to_send(tokens.experts, traffic.messages.experts, axis::kExpert) /
                     static_cast<double>(parts);
  // Counts for a layer: rows there and back in its forward; the same in its backward and, where it
  // is computed again, the forward's once more.
  auto& experts = found.of_experts;
  experts.forward = 3;
  experts.backward = of.config.activation_checkpoint.of_layers() == RecomputeMode::kNone ? 2 : 5;
  const auto count = static_cast<double>(traffic.messages.experts) / static_cast<double>(parts);
  experts.layers = static_cast<int>(std::lround(count / (experts.forward + experts.backward)));
  if (experts.layers > 0) {
    experts.cost = found.experts_ms / (experts.layers * (experts.forward + experts.backward));
  }
  return found;
}

check::StepTime of_stages(const Forecast& of, const PipelinePlan& plan, CheckedRun& checked) {
  const double of_operation = 1e3 / of.machine.flops->of(most_computed(of.contract));
  auto costs =
      stage_costs(plan, stepped_config(of.config, of.dims), of.dims.cp * of.dims.tp, of_operation);
  check::StepTime time;
  double sharding = 0;
  for (std::size_t rank = 0; rank < checked.steps.size(); ++rank) {
    const StepTraffic traffic = step_traffic(of.config, checked.steps[rank]);
    const auto stages = plan.schedule.stages_of(static_cast<int>(rank));
    const Exchanged exchanged = exchanged_in_stage(of, traffic, stages.size());
    const bool takes_turns =
        plan.overlap != pipeline::Overlap::kOff && exchanged.of_experts.layers > 0;
    const double in_turn = exchanged.tensor_ms + (takes_turns ? 0.0 : exchanged.experts_ms);
    double computed = 0, again = 0;
    for (const int stage : stages) {
      auto& cost = costs.at(static_cast<std::size_t>(stage));
      computed += cost.forward + cost.input_gradient + cost.weight_gradient;
      again += cost.input_gradient - cost.forward;
      cost.forward += in_turn / 2;
      cost.input_gradient += in_turn / 2;
      if (takes_turns) cost = with_exchanges(cost, exchanged.of_experts);
      const auto tokens = traffic.of_tokens.value_or(StepTraffic::OfTokens());
      const auto messages = std::max<std::int64_t>(1, traffic.messages.stages);
      cost.send_forward = cost.send_backward =
          of.ms_to_send(tokens.messages / messages, 1, axis::kPipeline);
    }
    const auto batches = static_cast<double>(traffic.micro_batches);
    time.compute_ms = std::max(time.compute_ms, batches * computed);
    time.again_ms = std::max(time.again_ms, batches * again);
    time.rest_ms = std::max(time.rest_ms, batches * in_turn * static_cast<double>(stages.size()));
    sharding = std::max(
        sharding, of.ms_to_send(traffic.gathers + traffic.reductions, 1, axis::kShard) +
                      of.ms_to_send(traffic.replicas, traffic.messages.replicas, axis::kReplicate));
  }
  const auto simulated = pipeline::simulate(plan.schedule, costs);
  double idle = 0, exposed = 0;
  for (const auto& rank : simulated.ranks) {
    idle += rank.idle;
    exposed = std::max(exposed, rank.exposed_exchange);
  }
  time.rest_ms += exposed;
  time.bubble = idle / (simulated.makespan * static_cast<double>(simulated.ranks.size()));
  time.waited_ms = sharding;
  time.step_ms = simulated.makespan + sharding;
  checked.report.schedule = pipeline::to_svg(plan.schedule, simulated);
  return time;
}

}  // namespace

void forecast_step(const Config& config, const ModelSource& source, int world,
                   const check::Machine& machine, const std::string& by, CheckedRun& checked) {
  if (checked.steps.empty()) return;  // a dry step that failed says no bytes
  const ParallelDims dims = resolve_parallelism(config.parallelism, world);
  const Forecast of{.config = config,
                    .source = source,
                    .dims = dims,
                    .machine = machine,
                    .contract = resolve_model(source, config, dims),
                    .mesh = mesh_shape(dims)};
  const auto plan = resolve_pipeline(
      config, dims, source.spec, source.description,
      {.micro_batches = resolve_micro_batches(
           config, Verb::kContract, rows_in_step(config.training, dims), dims.data_ranks()),
       .row_tokens = config.training.seq_len.value_or(0)});
  auto time = plan ? of_stages(of, *plan, checked) : without_stages(of, checked);
  time.by = by;
  checked.report.time = std::move(time);
}

}  // namespace tessera::train
