// Sums that are formed twice, over others, in too few digits, or not at all.
#include <ATen/ATen.h>

#include <cmath>

#include "comm/group.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "golden/faults.h"
#include "parallel/collectives.h"

namespace tessera::golden {
namespace {

Changes raw(const std::string& ending, std::function<at::Tensor(const at::Tensor&)> change) {
  return {.parts = [=](const RankParts& rank) { on_raw_gradient(rank, ending, change); }};
}

/// As if the layer had summed it already.
Changes summed_by_the_layer(const std::string& ending) {
  return {.parts = [=](const RankParts& rank) {
    on_raw_gradient(rank, ending, [tp = parallel::axis_of(rank.mesh, "tp")](const at::Tensor& own) {
      return parallel::exchange_sum(own, tp, std::nullopt, "by the layer");
    });
  }};
}

Changes reduced_in_bfloat16(const std::string& ending) {
  return {.parts = [=](const RankParts& rank) {
    on_contracts(rank, ending, [](GradContract& each) { each.reduce = DType::kBFloat16; });
  }};
}

/// Every parameter is divided by the ranks that sum it, and the loss was multiplied by all data
/// ranks: 1 for what all of them sum.
void divided_by_own_group(const RankParts& rank) {
  const double all = DataAxes(rank.mesh.shapes()).dense.divide_factor;
  on_contracts(rank, "mlp.experts", [&](GradContract& each) {
    double group = 1;
    for (const auto& axis : each.reductions.shard_axes) group *= rank.mesh.size_of(axis);
    each.reductions.divide_factor = group / all;
  });
}

/// Whether the norm wrongly leaves out a shard of this rank.
using LeftOut = std::function<bool(const RankParts&, const ShardView&)>;

/// As gradient_norm, without that.
double norm_without(const RankParts& rank, const ShardedBase& model, const LeftOut& left_out) {
  double sum = 0;
  for (const ShardView& view : model.shards()) {
    const auto& axes = view.contract->layout.axes;
    bool counts = view.shard.grad().defined();
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const bool once = axes[i].parameter.kind == PlacementKind::kInvariant;
      if (once && view.coordinates[i] != 0) counts = false;
    }
    if (counts && left_out(rank, view)) {
      counts = false;
      rank.act();
    }
    if (counts) sum += view.shard.grad().to(at::kDouble).square().sum().item<double>();
  }
  const auto total = at::full({1}, sum, at::kDouble);
  comm::all_reduce(*fsdp::unit_of_handle(model.unit()).runtime().data_group(), total, "norm");
  return std::sqrt(total.item<double>());
}

Changes norm_leaves_out(const LeftOut& left_out) {
  return {.norm = [=](const RankParts& rank, const ShardedBase& model) {
    return norm_without(rank, model, left_out);
  }};
}

/// Counts only the first rank's part of what is cut over `axis`.
Changes only_first_counts(std::string axis) {
  return norm_leaves_out([=](const RankParts&, const ShardView& view) {
    const auto& axes = view.contract->layout.axes;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if (axes[i].axis == axis && axes[i].parameter.kind == PlacementKind::kShard &&
          view.coordinates[i] != 0) {
        return true;
      }
    }
    return false;
  });
}

/// Experts are told apart by the dense mesh: as if ranks of tp had the same ones.
bool is_expert_beyond_the_first_of_tp(const RankParts& rank, const ShardView& view) {
  return view.contract->name.find("mlp.experts") != std::string::npos &&
         rank.mesh.coordinate(axis::kTensor) != 0;
}

std::vector<Fault> of_experts() {
  const Degrees experts{.shard = 2, .ep = 2};
  const Degrees experts_over_tp{.tp = 2, .ep = 2, .router = RouterTokens::kAll};
  const Degrees spread{.shard = 2, .tp = 2, .ep = 2, .etp = 2};
  return {
      {"ExpertsDividedByAnotherFactor",
       "Experts are divided by their own, smaller group",
       "pytorch #160285",
       kQwen,
       experts,
       {.parts = divided_by_own_group},
       CaughtBy::kGradients,
       "mlp.experts.down_proj"},
      {"NoGradientWithoutTokens",
       "A rank without tokens has no gradient instead of zeros",
       "NeMo Automodel #2995",
       kQwen,
       {.shard = 4},
       raw("experts.down_proj",
           [](const at::Tensor& own) {
             return own.count_nonzero().item<std::int64_t>() == 0 ? at::Tensor() : own;
           }),
       CaughtBy::kNothing,
       ""},
      {"NormWithoutExpertRanks", "The norm leaves out the other ranks' experts",
       "NeMo Automodel #3816", kQwen, experts, only_first_counts("ep"), CaughtBy::kNorm, ""},
      {"NormOfTheFirstTpRanksExperts", "The norm takes experts of the first tp rank alone",
       "Megatron-LM #5916", kQwen, experts_over_tp,
       norm_leaves_out(is_expert_beyond_the_first_of_tp), CaughtBy::kNorm, ""},
      {"NormWithoutCutExperts", "The norm leaves out what other etp ranks hold of cut experts",
       "Megatron-LM #5916", kQwen, spread, only_first_counts("etp"), CaughtBy::kNorm, ""},
      {"NormWithoutHeads",
       "The norm leaves out what other tp ranks hold of cut parameters",
       "Megatron-LM #7452",
       kGptOss,
       {.tp = 2},
       only_first_counts("tp"),
       CaughtBy::kNorm,
       ""},
  };
}

}  // namespace

std::vector<Fault> faults_of_sums() {
  const Degrees shards{.tp = 2};
  Changes narrow{.config = [](train::Config& config) {
    config.precision.activation_reduce_dtype.dtype = DType::kBFloat16;
  }};
  narrow.transitions = [](const RankParts& rank) {
    return std::make_unique<StandIn>(
        [=](const parallel::Transition& of, const at::Tensor& x) {
          if (of.axis.reduce == at::kBFloat16) rank.act();
          return of.forward(x);
        },
        nullptr);
  };
  std::vector<Fault> faults{
      {"RouterReducedTwice", "The router's layer sums its gradient, and the shards again",
       "torchtitan #2388", kQwen, shards, summed_by_the_layer("mlp.gate.weight"),
       CaughtBy::kGradients, "mlp.gate.weight"},
      {"RouterSummedInBFloat16", "The router's sum over tp travels in bf16", "pytorch #190626",
       kQwen, shards, reduced_in_bfloat16("mlp.gate.weight"), CaughtBy::kGradients,
       "mlp.gate.weight"},
      {"ActivationsSummedInBFloat16", "Sums of activations travel in bf16", "pytorch #190626",
       kQwen, shards, narrow, CaughtBy::kGradients, "mlp.gate.weight"},
  };
  const auto experts = of_experts();
  faults.insert(faults.end(), experts.begin(), experts.end());
  return faults;
}

}  // namespace tessera::golden
