// Routers of sigmoids: the bias that stands in files and counts for the choice alone (DeepSeek V3),
// and scores that multiply what goes into experts (Llama 4).
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <memory>

#include "golden/faults.h"
#include "models/expert_bias.h"

namespace tessera::golden {
namespace {

using parallel::Transition;

constexpr std::int64_t kTokenSize = 32;
constexpr const char* kStoredBias = "mlp.gate.e_score_correction_bias";

bool is_stored(const std::string& buffer) { return models::HasExpertBias::is_stored_name(buffer); }

/// Returns the biases of the layers with experts, in their order.
std::vector<at::Tensor> stored_biases(const RankParts& rank) {
  std::vector<at::Tensor> biases;
  for (const auto& buffer : rank.parts.model->named_buffers()) {
    if (is_stored(buffer.key())) biases.push_back(buffer.value());
  }
  return biases;
}

/// Indices or weights [M, K] on their way to experts.
bool is_routing(const Transition& of, const at::Tensor& x) {
  return of.kind == "slice" && of.where == "tokens of experts" && x.size(-1) != kTokenSize;
}

/// Weights of the chosen experts and their biases, as if those were no other scores.
Changes bias_in_the_weights() {
  struct Met {
    at::Tensor chosen;
    std::size_t layers = 0;
  };
  return {.transitions = [](const RankParts& rank) {
    return std::make_unique<StandIn>(
        [rank, met = std::make_shared<Met>()](const Transition& of, const at::Tensor& x) {
          if (!is_routing(of, x)) return of.forward(x);
          if (!x.is_floating_point()) {
            met->chosen = x;
            return of.forward(x);
          }
          rank.act();
          const auto biases = stored_biases(rank);
          return of.forward(x + biases.at(met->layers++ % biases.size()).take(met->chosen));
        },
        nullptr);
  }};
}

Changes bias_of_zeros() {
  return {.parts = [](const RankParts& rank) {
    rank.after_sharding.emplace_back([rank] {
      const at::NoGradGuard no_grad;
      for (at::Tensor& bias : stored_biases(rank)) {
        bias.zero_();
        rank.act();
      }
    });
  }};
}

Changes bias_in_bfloat16() {
  return {.parts = [](const RankParts& rank) {
    for (BufferContract& each : rank.parts.contract.buffers) {
      if (!is_stored(each.name)) continue;
      each.compute = DType::kBFloat16;
      rank.act();
    }
  }};
}

Changes bias_as_parameter() {
  return {.parts = [](const RankParts& rank) {
    for (const auto& module : rank.parts.model->named_modules()) {
      if (!module.key().ends_with("mlp.gate")) continue;
      const auto biases = stored_biases(rank);
      module.value()->register_parameter(models::HasExpertBias::kStoredName,
                                         at::zeros_like(biases.front()));
      rank.act();
    }
  }};
}

Changes scores_after_experts() {
  return {.spec = [](models::ModelSpec& spec) { spec.moe->scores_before_experts = false; }};
}

Changes scores_without_gradient() {
  return {.transitions = [](const RankParts& rank) {
    return std::make_unique<StandIn>(nullptr, [rank](const Transition& of, const at::Tensor& grad) {
      const at::Tensor back = of.backward(grad);
      if (!is_routing(of, grad)) return back;
      rank.act();
      return at::zeros_like(back);
    });
  }};
}

}  // namespace

std::vector<Fault> faults_of_scores() {
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
  const Degrees experts_over_tp{.shard = 2, .tp = 2, .ep = 2};
  const Degrees experts{.shard = 2, .ep = 2};
  return {
      {"StoredBiasInTheWeights", "The bias on the choice of experts counts in their weights, too",
       "vLLM #12002, transformers #41647", kSigmoid, all, bias_in_the_weights(),
       CaughtBy::kGradients, "mlp.experts"},
      {"StoredBiasNotUsed", "The choice of experts goes by the sigmoids alone",
       "next to vLLM #12002", kSigmoid, experts_over_tp, bias_of_zeros(), CaughtBy::kGradients,
       "mlp.gate.weight"},
      {"StoredBiasInBFloat16", "A stored bias is kept in bf16", "vLLM #23640, #50761", kSigmoid,
       experts_over_tp, bias_in_bfloat16(), CaughtBy::kBias, kStoredBias, Setting::kBalance},
      {"StoredBiasIsAParameter", "A stored bias is registered as a parameter, which is trained",
       "next to Pai-Megatron-Patch #467", kSigmoid, experts_over_tp, bias_as_parameter(),
       CaughtBy::kSharding, kStoredBias},
      {"ScoresAfterExperts", "Llama 4's scores multiply what experts give",
       "next to torchtitan #2416", kLlama4, experts, scores_after_experts(), CaughtBy::kGradients,
       "feed_forward.router.weight"},
      {"ScoresOfInputsWithoutGradient",
       "The scores of experts' inputs go through an operation without backward",
       "next to NeMo Automodel #2995", kLlama4, all, scores_without_gradient(),
       CaughtBy::kGradients, "feed_forward.router.weight", Setting::kPlain, true},
  };
}

}  // namespace tessera::golden
