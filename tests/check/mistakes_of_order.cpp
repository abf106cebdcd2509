// Known kinds of another order, and of replicas that are none.
#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "check/mistakes_by_area.h"
#include "comm/group.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/small/small_spec.h"

namespace tessera::mistakes {
namespace {

using check::FindingKind;

/// Units with layers, in the order of the model.
std::vector<std::string> layers_of(const Ground& ground) {
  std::vector<std::string> units;
  for (const auto& parameter : ground.run.source.description.parameters) {
    const bool is_layer = parameter.unit.find("layers.") != std::string::npos ||
                          parameter.unit.find("h.") != std::string::npos;
    if (is_layer && (units.empty() || units.back() != parameter.unit)) {
      units.push_back(parameter.unit);
    }
  }
  return units;
}

/// One rank holds a reduction back until it has issued the next collective: not that of the first
/// layer, behind which there may be none.
std::optional<Mistake> order_of_one_rank(Draws& draws, const Ground& ground) {
  auto units = layers_of(ground);
  if (ground.run.dims.dp_shard == 1 || units.size() < 2) return std::nullopt;
  units.erase(units.begin());
  const std::string unit = pick(draws, units);
  const bool first = draws.below(2) == 0;
  Mistake mistake{.kind = Kind::kOrderOfOneRank,
                  .place = concat("reduction of ", unit, " on rank ", first ? 0 : 1),
                  .changes = {},
                  .named_by = [=](const check::Finding& finding) {
                    return finding.unit == unit || says(finding, unit);
                  }};
  mistake.changes.holds_back = [=](const comm::Group& group, const comm::Label& label) {
    return group.size() > 1 && group.rank() == (first ? 0 : 1) &&
           label.kind == comm::Kind::kReduceScatter && label.unit == unit;
  };
  return mistake;
}

std::string first_unit_of_second_stage(const Ground& ground) {
  const auto& run = ground.run;
  const auto plan =
      train::resolve_pipeline(run.config, run.dims, run.source.spec, run.source.description,
                              {run.micro_batches, train::kSmallPositions});
  return layers_of(ground).at(
      static_cast<std::size_t>(train::stage_layers(plan.value(), 1).layers.begin));
}

std::optional<Mistake> message_of_another(Draws& draws, const Ground& ground) {
  if (ground.run.dims.pp == 1) return std::nullopt;
  const bool forward = draws.below(2) == 0;
  const int stage = forward ? 0 : 1;
  const auto unit = first_unit_of_second_stage(ground);
  Mistake mistake{.kind = Kind::kMessageOfAnotherMicroBatch,
                  .place = concat(forward ? "activations" : "gradients", " of stage ", stage),
                  .changes = {},
                  .named_by = [=](const check::Finding& finding) {
                    const bool is_kind =
                        finding.kind == FindingKind::kOrder ||
                        finding.kind == FindingKind::kRefused ||
                        finding.kind == (forward ? FindingKind::kForward : FindingKind::kBackward);
                    return is_kind && (has_axis(finding, "pp") || says(finding, "stage"));
                  }};
  mistake.changes.sends_as = [=](comm::P2PTag tag) {
    using enum comm::P2PTag::Direction;
    const bool is_one = tag.direction == (forward ? kForward : kBackward) && tag.stage == stage &&
                        tag.micro_batch < 2;
    if (is_one) tag.micro_batch = 1 - tag.micro_batch;
    return tag;
  };
  return mistake;
}

/// A rank's part of `parameter`, in its second replica over `axis`, is another one from the start.
std::optional<Mistake> begins_elsewhere(Draws& draws, const Ground& ground) {
  const auto over = draw_replicated(draws, ground);
  if (!over) return std::nullopt;
  Mistake mistake = of_replicated(Kind::kReplicaBeginsElsewhere, *over);
  mistake.changes.model = [over = *over](const Mesh& mesh, ShardedBase& model,
                                         const std::function<void()>& act) {
    if (over.change_on(mesh, model)) act();
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> orders(Kind kind, Draws& draws, const Ground& ground) {
  if (kind == Kind::kOrderOfOneRank) return order_of_one_rank(draws, ground);
  if (kind == Kind::kMessageOfAnotherMicroBatch) return message_of_another(draws, ground);
  return std::nullopt;
}

std::optional<Replicated> draw_replicated(Draws& draws, const Ground& ground) {
  const auto all = contracts_of_run(ground);
  const bool has_replicas = ground.layout.replicate > 1;
  const auto is_whole = [](const GradContract& one) {
    return !one.layout.axes.empty() && one.layout.axes.front().axis == "tp" &&
           one.layout.axes.front().parameter.kind == PlacementKind::kInvariant;
  };
  const bool over_tensor = ground.layout.tp > 1 && (!has_replicas || draws.below(2) == 0);
  if (!over_tensor && !has_replicas) return std::nullopt;
  const auto parameter = draw_parameter(draws, all, [&](const GradContract& one) {
    return one.trainable && (!over_tensor || is_whole(one));
  });
  if (!parameter) return std::nullopt;
  return Replicated{parameter->name, over_tensor ? "tp" : "dp_replicate"};
}

bool Replicated::change_on(const Mesh& mesh, const ShardedBase& model) const {
  for (const std::string_view axis :
       {axis::kPipeline, axis::kReplicate, axis::kShard, axis::kTensor}) {
    const int there = axis == over ? 1 : 0;
    // Where it lies in a pipeline the parameter says.
    if (axis != axis::kPipeline && mesh.coordinate(axis) != there) return false;
  }
  const at::NoGradGuard no_grad;
  for (const ShardView& view : model.shards()) {
    if (view.contract->name != parameter || view.begin == view.end) continue;
    view.shard.view({-1})[0] += 0.25;
    return true;
  }
  return false;
}

Mistake of_replicated(Kind kind, const Replicated& one) {
  return {.kind = kind,
          .place = concat(one.parameter, " over ", one.over),
          .changes = {},
          .named_by = [=](const check::Finding& finding) {
            return says(finding, concat("'", one.parameter, "' over ", one.over, ":"));
          }};
}

std::optional<Mistake> replicas(Kind kind, Draws& draws, const Ground& ground) {
  return kind == Kind::kReplicaBeginsElsewhere ? begins_elsewhere(draws, ground) : std::nullopt;
}

}  // namespace tessera::mistakes
