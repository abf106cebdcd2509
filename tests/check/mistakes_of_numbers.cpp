// Known kinds of wrong numbers other than gradients: labels, biases of experts, the norm.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/mistakes_by_area.h"
#include "parallel/axis.h"
#include "train/parallelize.h"

namespace tessera::mistakes {
namespace {

using golden::SumStandIn;
using train::RankSum;

constexpr std::size_t kLosses = 2;  // in front of the counts of a step

int data_ranks(const Mesh& mesh) {
  return mesh.size_of(axis::kReplicate) * mesh.size_of(axis::kShard);
}

Mistake labels_shifted(Draws& draws, const Ground& ground) {
  const auto rank =
      static_cast<int>(draws.below(static_cast<std::size_t>(ground.run.dims.data_ranks())));
  auto mistake = of_number(Kind::kLabelsShifted, "loss", concat("data rank ", rank));
  mistake.changes.micro_batch = [=](const Mesh& mesh, const train::MicroBatch& batch) {
    if (train::data_rank(mesh) != rank % data_ranks(mesh)) return false;
    batch.targets.copy_(batch.targets.roll(-1, 1));
    return true;
  };
  return mistake;
}

Mistake labels_miscounted(Draws& draws, const Ground& ground) {
  const auto& dims = ground.run.dims;
  const bool of_tensor = dims.tp > 1 && (dims.data_ranks() == 1 || draws.below(2) == 0);
  auto mistake = of_number(Kind::kLabelsMiscounted, "number of labels",
                           of_tensor ? "once a rank of tp" : "those of one rank");
  mistake.changes.sums = other_sum(
      RankSum::kLabels,
      [=](const Mesh& mesh, const SumStandIn::Values& of_ranks, std::vector<double> right) {
        if (!of_tensor) return of_ranks.at(place_of(mesh, 0));
        for (double& one : right) one *= mesh.size_of(axis::kTensor);
        return right;
      });
  return mistake;
}

/// A rank takes its own counts of a step.
std::optional<Mistake> bias_of_own_tokens(const Ground& ground) {
  if (ground.run.config.model.load_balance_coeff == 0) return std::nullopt;
  auto mistake = of_number(Kind::kBiasOfOwnTokens, "expert bias", "each rank by its own counts");
  mistake.changes.sums = other_sum(
      RankSum::kStep,
      [](const Mesh& mesh, const SumStandIn::Values& of_ranks, std::vector<double> right) {
        const auto& own = of_ranks.at(place_of(mesh, mesh.coordinate(axis::kTensor)));
        std::copy(own.begin() + kLosses, own.end(), right.begin() + kLosses);
        return right;
      });
  return mistake;
}

std::optional<Mistake> norm_misses_axis(Draws& draws, const Ground& ground) {
  std::vector<std::string_view> axes;
  const auto& dims = ground.run.dims;
  if (dims.pp > 1) axes.push_back(axis::kPipeline);
  if (dims.dp_shard > 1) axes.push_back(axis::kShard);
  if (dims.tp > 1) axes.push_back(axis::kTensor);
  if (axes.empty()) return std::nullopt;
  const std::string left_out(pick(draws, axes));
  auto mistake = of_number(Kind::kNormMissesAxis, "gradient norm", left_out);
  if (left_out == axis::kPipeline) {
    mistake.changes.stages_of_norm = [](const RankParts& rank) -> Changes::Stages {
      return [=](comm::Group* stages) -> comm::Group* {
        if (stages != nullptr) rank.act();
        return nullptr;
      };
    };
    return mistake;
  }
  const auto other = left_out == axis::kTensor ? axis::kShard : axis::kTensor;
  mistake.changes.sum_of_norm = [=](const RankParts& rank) -> Changes::SumOfNorm {
    const bool is_axis_here = rank.mesh.size_of(left_out) > 1;
    return [=, over = parallel::axis_of(rank.mesh, other)](double mine, comm::Group* replica) {
      if (!is_axis_here) return sum_over(replica, mine);
      rank.act();
      return sum_over(over.group.get(), mine);
    };
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> numbers(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kLabelsShifted:
      return labels_shifted(draws, ground);
    case Kind::kLabelsMiscounted:
      if (ground.run.dims.data_ranks() * ground.run.dims.tp == 1) return std::nullopt;
      return labels_miscounted(draws, ground);
    case Kind::kBiasOfOwnTokens:
      return bias_of_own_tokens(ground);
    case Kind::kNormMissesAxis:
      return norm_misses_axis(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
