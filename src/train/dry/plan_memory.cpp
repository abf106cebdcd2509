#include "train/dry/plan_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text/printable.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_step.h"
#include "train/dry/rank_memory.h"

namespace tessera::train {
namespace {

/// The last micro-batch's passes of the layers' units.
struct LayerPasses {
  std::vector<DryPass> forwards;  ///< in their order
  std::map<std::string, DryPass> backwards;
  std::int64_t end = 0;  ///< held when the whole forward had ended
};

LayerPasses passes_of_layers(const DryStep& step, const models::ModelDescription& model) {
  std::set<std::string> layers;
  for (const auto& parameter : model.parameters) {
    if (parameter.layer) layers.emplace(unit_label(parameter.unit));
  }
  LayerPasses found;
  for (const DryPass& pass : step.passes) {
    if (!pass.is_forward) {
      found.backwards.insert_or_assign(pass.unit, pass);
      continue;
    }
    found.end = pass.after;  // the root's comes last
    if (!layers.contains(pass.unit)) continue;
    const bool is_next_micro_batch =
        std::ranges::find(found.forwards, pass.unit, &DryPass::unit) != found.forwards.end();
    if (is_next_micro_batch) found.forwards.clear();
    found.forwards.push_back(pass);
  }
  return found;
}

std::int64_t kept(const DryPass& forward) { return forward.after - forward.before; }

class Activations {
 public:
  Activations(const DryStep& step, const models::ModelDescription& model)
      : idle_(step.between_steps - step.held.pool) {
    const LayerPasses passes = passes_of_layers(step, model);
    std::int64_t held = idle_;
    for (const DryPass& forward : passes.forwards) {
      found_.beside += forward.before - held;
      held = forward.after;
      found_.units.push_back({.unit = forward.unit, .none = kept(forward)});
    }
    found_.after = passes.end - held;
    // Gradients of activations, raw ones, an update's memory: whatever comes on top of what is kept.
    passing_ = std::max<std::int64_t>(0, step.peak - step.held.pool - passes.end);
  }

  void add(const DryStep& step, const models::ModelDescription& model,
           std::int64_t UnitActivations::* in_mode, std::int64_t UnitActivations::* again) {
    const LayerPasses passes = passes_of_layers(step, model);
    std::int64_t before = idle_ + found_.beside + passing_;
    for (std::size_t i = 0; i < found_.units.size(); ++i) {
      auto& unit = found_.units[i];
      unit.*in_mode = kept(passes.forwards.at(i));
      unit.*again = std::max(unit.none, unit.*in_mode);
      const auto backward = passes.backwards.find(unit.unit);
      if (backward != passes.backwards.end()) {
        unit.*again = std::max(unit.*again, backward->second.most - before);
      }
      before += unit.*in_mode;
    }
  }

  std::int64_t passing() const { return passing_; }
  const ForwardActivations& found() const { return found_; }

 private:
  const std::int64_t idle_;
  std::int64_t passing_ = 0;
  ForwardActivations found_;
};

}  // namespace

PlanMemory plan_memory(const Config& config, const ModelSource& source, const ParallelDims& dims,
                       const ExpertLoads& loads) {
  const int rank = busiest_rank(loads, mesh_shape(dims), 0);
  const auto step_in = [&](RecomputeMode mode) {
    Config stepped = stepped_config(config, dims, mode);
    auto& training = stepped.training;
    const std::int64_t micro_batch = training.local_batch_size.value_or(1) * dims.data_ranks();
    training.global_batch_size = std::min(training.global_batch_size, 2 * micro_batch);
    // Form 1 lets gradients wait for the last micro-batch, form 2 does not.
    if (config.compile.form == 2) training.sync_every_micro_batch = true;
    return dry_step(stepped, source, rank, dims.world_size(), {.loads = loads});
  };
  const DryStep none = step_in(RecomputeMode::kNone);
  const RankMemory held = rank_memory(none);
  PlanMemory memory;
  memory.state = held.moments + held.master;
  memory.others = held.parameters + held.gradients + held.reductions;
  if (!config.training.seq_len) return memory;
  Activations activations(none, source.description);
  activations.add(step_in(RecomputeMode::kSelective), source.description,
                  &UnitActivations::selective, &UnitActivations::selective_again);
  activations.add(step_in(RecomputeMode::kFull), source.description, &UnitActivations::full,
                  &UnitActivations::full_again);
  memory.passing = activations.passing();
  memory.others += memory.passing;
  memory.activations = activations.found();
  return memory;
}

}  // namespace tessera::train
