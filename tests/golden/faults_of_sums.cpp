// Sums that are formed twice, over others, in too few digits, or not at all.
#include <ATen/ATen.h>

#include <cmath>

#include "comm/group.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "golden/faults.h"
#include "parallel/exchange.h"

namespace tessera::golden {
namespace {

constexpr const char* kQwen = "qwen3-moe-fp32";
constexpr const char* kGptOss = "gpt-oss-fp32";

Changes raw(const std::string& ending, std::function<at::Tensor(const at::Tensor&)> change) {
  return {.parts = [=](const RankParts& rank) { on_raw_gradient(rank, ending, change); }};
}

Changes scaled(const std::string& ending, double factor) {
  return raw(ending, [=](const at::Tensor& gradient) { return gradient * factor; });
}

/// As if the layer had summed it already.
Changes summed_by_the_layer(const std::string& ending) {
  return {.parts = [=](const RankParts& rank) {
    on_raw_gradient(rank, ending, [tp = parallel::axis_of(rank.mesh, "tp")](const at::Tensor& own) {
      return parallel::exchange_sum(own, tp, std::nullopt, "by the layer");
    });
  }};
}

Changes reduced_in_bfloat16(const std::string& part) {
  return {.parts = [=](const RankParts& rank) {
    for (GradContract& each : rank.parts.contract.parameters) {
      if (each.name.find(part) != std::string::npos) each.reduce = DType::kBFloat16;
    }
  }};
}

/// As gradient_norm, but of what is cut over `axis` only the first rank's part counts.
double norm_without(const ShardedBase& model, std::string_view axis) {
  double sum = 0;
  for (const ShardView& view : model.shards()) {
    const auto& axes = view.contract->layout.axes;
    bool counts = view.shard.grad().defined();
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const bool once = axes[i].parameter.kind == PlacementKind::kInvariant ||
                        (axes[i].parameter.kind == PlacementKind::kShard && axes[i].axis == axis);
      if (once && view.coordinates[i] != 0) counts = false;
    }
    if (counts) sum += view.shard.grad().to(at::kDouble).square().sum().item<double>();
  }
  const auto total = at::full({1}, sum, at::kDouble);
  comm::all_reduce(*fsdp::unit_of_handle(model.unit()).runtime().data_group(), total, "norm");
  return std::sqrt(total.item<double>());
}

Changes only_first_counts(std::string axis) {
  return {.norm = [=](const ShardedBase& model) { return norm_without(model, axis); }};
}

std::vector<Fault> of_experts() {
  const Degrees experts{.shard = 2, .ep = 2};
  const Degrees lent{.tp = 2, .ep = 2};
  return {
      {"ExpertsDividedByAnotherFactor", "Experts are divided by their own, smaller group",
       "pytorch #160285", kQwen, experts, scaled("experts.down_proj", 2.0), CaughtBy::kGradients,
       "mlp.experts.down_proj"},
      {"ExpertsCountEveryRankOfTp", "Experts count the tokens of every tp rank again",
       "NeMo Automodel #2995", kQwen, lent, scaled("experts.gate_up_proj", 2.0),
       CaughtBy::kGradients, "mlp.experts.gate_up_proj"},
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
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees cut{.tp = 2, .etp = 2};
  const auto no_loss = [](train::Config& config) { config.model.aux_loss_coef = 0.0; };
  const auto narrow = [](train::Config& config) {
    config.precision.activation_reduce_dtype.dtype = DType::kBFloat16;
  };
  Changes every_rank{.config = with_auxiliary_loss};
  every_rank.transitions = [](const RankParts&) {
    return std::make_unique<StandIn>(nullptr,
                                     [](const parallel::Transition& of, const at::Tensor& grad) {
                                       return of.kind == "only_first" ? grad : of.backward(grad);
                                     });
  };
  std::vector<Fault> faults{
      {"RouterReducedTwice", "The router's layer sums its gradient, and the shards again",
       "torchtitan #2388", kQwen, shards, summed_by_the_layer("mlp.gate.weight"),
       CaughtBy::kGradients, "mlp.gate.weight"},
      {"BiasScaledByTp", "A bias that every rank adds is scaled by 1 / tp, and its gradient too",
       "torchtitan #4332", kGptOss, whole, scaled("o_proj.bias", 0.5), CaughtBy::kGradients,
       "o_proj.bias"},
      {"RouterSummedInBFloat16", "The router's sum over tp travels in bf16", "pytorch #190626",
       kQwen, shards, reduced_in_bfloat16("mlp.gate.weight"), CaughtBy::kGradients,
       "mlp.gate.weight"},
      {"ActivationsSummedInBFloat16",
       "Sums of activations travel in bf16",
       "pytorch #190626",
       kQwen,
       shards,
       {.config = narrow},
       CaughtBy::kGradients,
       "mlp.gate.weight"},
      {"AuxiliaryLossOnEveryRank", "Every tp rank adds the auxiliary loss of all tokens",
       "Megatron-LM #7452", kQwen, cut, every_rank, CaughtBy::kGradients, "mlp.gate.weight", true},
      {"AuxiliaryLossDiscarded",
       "The auxiliary loss is computed and not differentiated",
       "NeMo Automodel #1408",
       kQwen,
       shards,
       {.config = no_loss},
       CaughtBy::kGradients,
       "mlp.gate.weight",
       true},
  };
  const auto experts = of_experts();
  faults.insert(faults.end(), experts.begin(), experts.end());
  return faults;
}

}  // namespace tessera::golden
