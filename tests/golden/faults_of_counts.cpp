// Faults of the counts of chosen experts: in the auxiliary loss and the bias on the choice.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "golden/faults.h"

namespace tessera::golden {
namespace {

using parallel::Transition;

constexpr int kLayers = 4;
constexpr std::size_t kLosses = 2;  // in front of the counts of a step

/// Where all ranks have routed all tokens, the first one's probabilities and counts are what the
/// layer says; the model has no bias that goes the same way.
bool is_load(const Transition& of) { return of.kind == "only_first"; }
bool is_counts(const Transition& of, const at::Tensor& x) {
  return is_load(of) && !x.is_floating_point();
}

Changes backward_of_probabilities(StandIn::Way way) {
  return {.transitions = [=](const RankParts& rank) {
    return std::make_unique<StandIn>(nullptr, [=](const Transition& of, const at::Tensor& grad) {
      if (!is_load(of)) return of.backward(grad);
      rank.act();
      return way(of, grad);
    });
  }};
}

/// `way` of the n-th of a rank's counts, by layer within micro-batch.
Changes counts_of_layers(std::function<at::Tensor(int, const Transition&, const at::Tensor&)> way) {
  return {.transitions = [=](const RankParts& rank) {
    const auto met = std::make_shared<int>(0);
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          if (!is_counts(of, x)) return of.forward(x);
          rank.act();
          return way((*met)++, of, x);
        },
        nullptr);
  }};
}

/// Adds only the counts of ranks with this rank's coordinate on tp.
Changes counts_over_dp_alone() {
  return {.sums = [](const RankParts& rank) {
    return std::make_unique<SumStandIn>(
        [=](train::RankSum what, const SumStandIn::Values& of_ranks) {
          auto sums = train::added_by_rank(of_ranks);
          if (what != train::RankSum::kStep) return sums;
          rank.act();
          const auto tp = static_cast<std::size_t>(rank.mesh.size_of(axis::kTensor));
          const auto mine = static_cast<std::size_t>(rank.mesh.coordinate(axis::kTensor));
          for (std::size_t i = kLosses; i < sums.size(); ++i) {
            sums[i] = 0;
            for (std::size_t r = mine; r < of_ranks.size(); r += tp) sums[i] += of_ranks[r][i];
          }
          return sums;
        });
  }};
}

/// Takes only the rank's counts of a step.
Changes counts_of_one_rank() {
  return {.sums = [](const RankParts& rank) {
    return std::make_unique<SumStandIn>([=](train::RankSum what,
                                            const SumStandIn::Values& of_ranks) {
      auto sums = train::added_by_rank(of_ranks);
      if (what != train::RankSum::kStep) return sums;
      rank.act();
      const auto& own = of_ranks.at(static_cast<std::size_t>(train::data_rank(rank.mesh)) *
                                        static_cast<std::size_t>(rank.mesh.size_of(axis::kTensor)) +
                                    static_cast<std::size_t>(rank.mesh.coordinate(axis::kTensor)));
      std::copy(own.begin() + kLosses, own.end(), sums.begin() + kLosses);
      return sums;
    });
  }};
}

std::vector<Fault> of_the_auxiliary_loss() {
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
  const Degrees cut{.tp = 2, .etp = 2};
  const auto setting = Setting::kAuxiliaryLoss;
  return {
      {"AuxiliaryLossOnEveryRank", "Every tp rank adds the auxiliary loss of all tokens",
       "Megatron-LM #7452", kQwen, cut,
       backward_of_probabilities([](const Transition&, const at::Tensor& grad) { return grad; }),
       CaughtBy::kGradients, "mlp.gate.weight", setting, true},
      {"AuxiliaryLossDiscarded", "The auxiliary loss is computed, and its gradient dropped",
       "NeMo Automodel #1408", kQwen, all,
       backward_of_probabilities(
           [](const Transition&, const at::Tensor& grad) { return at::zeros_like(grad); }),
       CaughtBy::kGradients, "mlp.gate.weight", setting, true},
      {"CountsOverwrittenByTheirSum",
       "The counts' sum over tp overwrites the counts of the rank, and is summed again",
       "Megatron-LM #7452, item 10", kQwen, all,
       counts_of_layers([](int, const Transition&, const at::Tensor& counts) { return counts; }),
       CaughtBy::kGradients, "mlp.gate.weight", setting},
  };
}

}  // namespace

std::vector<Fault> faults_of_counts() {
  std::vector<Fault> faults = of_the_auxiliary_loss();
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
  const Degrees experts_over_tp{.shard = 2, .tp = 2, .ep = 2};
  const std::vector<Fault> of_the_bias{
      {"CountsNotSummedOverTp", "Each tp rank balances by the tokens of its own shards",
       "torchtitan #4154", kQwen, experts_over_tp, counts_over_dp_alone(), CaughtBy::kBias,
       "mlp.expert_bias", Setting::kBalance, true},
      {"StoredBiasByCountsOfOneRank",
       "Each tp rank moves a stored bias by the tokens of its own shards", "torchtitan #4154",
       kSigmoid, experts_over_tp, counts_over_dp_alone(), CaughtBy::kBias,
       "mlp.gate.e_score_correction_bias", Setting::kBalance, true},
      {"StoredBiasByOwnTokens", "Each data rank moves a stored bias by its own tokens",
       "next to torchtitan #4154", kSigmoid, Degrees{.shard = 2, .ep = 2}, counts_of_one_rank(),
       CaughtBy::kBias, "mlp.gate.e_score_correction_bias", Setting::kBalance, true},
      {"CountsOfTheLastMicroBatch", "A micro-batch's counts overwrite those of the one before",
       "next to torchtitan #1304", kQwen, all,
       counts_of_layers([](int met, const Transition& of, const at::Tensor& counts) {
         return met < kLayers ? at::zeros_like(counts) : of.forward(counts);
       }),
       CaughtBy::kBias, "mlp.expert_bias", Setting::kBalanceByRows, true},
  };
  faults.insert(faults.end(), of_the_bias.begin(), of_the_bias.end());
  return faults;
}

}  // namespace tessera::golden
