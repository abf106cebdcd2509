// Losses over a cut vocabulary, and means over what one rank has instead of all.
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <utility>

#include "golden/faults.h"

namespace tessera::golden {
namespace {

using parallel::Transition;

/// Every rank's largest logit, sum of exponentials and target: [ranks, 3, tokens].
constexpr int kExponentials = 1;

bool is_softmax(const Transition& of) {
  return of.kind == "all_gather" && of.where == "loss softmax";
}

Changes exponentials(std::function<void(const Transition&, const at::Tensor&)> change) {
  return {.transitions = [=](const RankParts& rank) {
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          at::Tensor all = of.forward(x);
          if (!is_softmax(of)) return all;
          rank.act();
          all = all.clone();
          change(of, all.select(1, kExponentials));
          return all;
        },
        nullptr);
  }};
}

/// Where this rank's values, or those of its first rank of tp, are among those of all.
std::size_t place_of(const Mesh& mesh, int tensor) {
  const int data = mesh.coordinate(axis::kReplicate) * mesh.size_of(axis::kShard) +
                   mesh.coordinate(axis::kShard);
  return static_cast<std::size_t>(data * mesh.size_of(axis::kTensor) + tensor);
}

/// Instead of the sum over ranks: one rank's values, as often as others would have added theirs.
Changes own_times(train::RankSum of,
                  std::function<std::pair<std::size_t, double>(const Mesh&)> own) {
  return {.sums = [=](const RankParts& rank) {
    return std::make_unique<SumStandIn>(
        [=](train::RankSum what, const SumStandIn::Values& of_ranks) {
          if (what != of) return train::added_by_rank(of_ranks);
          rank.act();
          const auto [place, times] = own(rank.mesh);
          std::vector<double> values = of_ranks.at(place);
          for (double& each : values) each *= times;
          return values;
        });
  }};
}

/// Ranks of tp compute with the same labels, and the first of them counts.
Changes own_labels() {
  return own_times(train::RankSum::kLabels, [](const Mesh& mesh) {
    return std::pair{place_of(mesh, 0),
                     1.0 * mesh.size_of(axis::kReplicate) * mesh.size_of(axis::kShard)};
  });
}

Changes own_choices() {
  return own_times(train::RankSum::kRouterLoad, [](const Mesh& mesh) {
    return std::pair{place_of(mesh, mesh.coordinate(axis::kTensor)),
                     1.0 * mesh.size_of(axis::kReplicate) * mesh.size_of(axis::kShard) *
                         mesh.size_of(axis::kTensor)};
  });
}

}  // namespace

std::vector<Fault> faults_of_losses() {
  const Degrees shards{.tp = 2};
  const Degrees both{.shard = 2, .tp = 2};
  const Degrees replicas{.replicate = 2, .tp = 2};
  return {
      {"SoftmaxOfTheOwnVocabulary",
       "The loss divides by a sum over the rank's part of the vocabulary",
       "Megatron-LM #7452, item 1", kQwen, shards,
       exponentials([](const Transition& of, const at::Tensor& sums) {
         const at::Tensor own = sums[of.axis.rank].clone();
         sums.zero_();
         sums[of.axis.rank].copy_(own);
       }),
       CaughtBy::kGradients, "lm_head.weight"},
      {"GatheredLogitsInTheLoss",
       "Gathered logits enter the loss of a cut vocabulary, which counts them once a rank",
       "Megatron-LM #7452, item 2", kQwen, shards,
       exponentials([](const Transition& of, const at::Tensor& sums) { sums.mul_(of.axis.size); }),
       CaughtBy::kGradients, "lm_head.weight"},
      {"MeanOverOwnLabels", "Each data rank's loss is the mean over its own labels",
       "Megatron-LM #7452, item 3", kQwen, both, own_labels(), CaughtBy::kGradients,
       "lm_head.weight"},
      {"MeanOverTheReplicasLabels", "Each replica's loss is the mean over its own labels",
       "next to Megatron-LM #7452, item 3", kQwen, replicas, own_labels(), CaughtBy::kGradients,
       "lm_head.weight"},
      {"AuxiliaryLossOfOwnChoices",
       "The auxiliary loss weighs a rank's probabilities by its own choices",
       "next to Megatron-LM #7452, item 10", kQwen, both, own_choices(), CaughtBy::kGradients,
       "mlp.gate.weight", Setting::kAuxiliaryLoss},
  };
}

}  // namespace tessera::golden
