// Layers that are wrong about their parameters, and contracts that are wrong about layers.
#include <ATen/ATen.h>

#include "golden/faults.h"
#include "parallel/collectives.h"
#include "tessera/error.h"

namespace tessera::golden {
namespace {

ParameterLayout invariant(std::string axis, int size) {
  return {
      .axes = {{std::move(axis), size, {PlacementKind::kInvariant}, {PlacementKind::kInvariant}}}};
}
ParameterLayout partial(std::string axis, int size) {
  return {
      .axes = {{std::move(axis), size, {PlacementKind::kReplicate}, {PlacementKind::kPartial}}}};
}

Changes parts(std::function<void(const RankParts&)> change) { return {.parts = std::move(change)}; }

/// Both the layer and the contract say so: nothing contradicts it.
Changes placed(const std::string& ending, const ParameterLayout& layout) {
  return parts([=](const RankParts& rank) { place(rank, ending, layout); });
}

std::vector<Fault> of_routers() {
  const Degrees shards{.tp = 2};
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
  const Degrees cut{.tp = 2, .etp = 2};
  const auto gate = invariant("tp", 2);
  return {
      {"RouterDeclaredInvariant", "The router's layer declares Invariant, the contract Replicate",
       "torchtitan #2387", kQwen, all,
       parts([=](const RankParts& rank) { declare(rank, "mlp.gate", gate); }), CaughtBy::kSharding,
       "model.layers.0.mlp.gate.weight"},
      {"RouterContractInvariant", "The contract of the router has Invariant, the layer Replicate",
       "torchtitan #2387", kQwen, all,
       parts([=](const RankParts& rank) { contract(rank, "mlp.gate", gate); }), CaughtBy::kSharding,
       "model.layers.0.mlp.gate.weight"},
      {"RouterUnreducedOnAllTokens", "No rank sums the router's gradient, experts whole",
       "torchtitan #2387, etp 1", kQwen, all, placed("mlp.gate", gate), CaughtBy::kInvariance,
       "mlp.gate.weight"},
      {"RouterUnreducedBeforeCutExperts", "No rank sums the router's gradient, experts cut",
       "torchtitan #2387, etp = tp", kQwen, cut, placed("mlp.gate", gate), CaughtBy::kInvariance,
       "mlp.gate.weight"},
      {"RouterUnreducedOnShards", "No rank sums the router's gradient, router on shards",
       "Megatron-LM #599, torchtitan #4054", kQwen, shards, placed("mlp.gate", gate),
       CaughtBy::kInvariance, "mlp.gate.weight"},
      {"RouterBiasUnreduced", "No rank sums the gradient of the router's bias", "torchtitan #4054",
       kGptOss, shards, placed("mlp.router", gate), CaughtBy::kInvariance, "mlp.router.bias"},
      {"RouterUnreducedScoresBefore",
       "No rank sums the router's gradient, experts whole, scores before them",
       "torchtitan #2387, etp 1", kQwen, all, placed("mlp.gate", gate), CaughtBy::kInvariance,
       "mlp.gate.weight", Setting::kScoresBefore, true},
      {"RouterUnreducedBeforeCutExpertsScoresBefore",
       "No rank sums the router's gradient, experts cut, scores before them", "torchtitan #1805",
       kQwen, cut, placed("mlp.gate", gate), CaughtBy::kInvariance, "mlp.gate.weight",
       Setting::kScoresBefore, true},
      {"RouterOfSigmoidsUnreduced", "No rank sums the gradient of a router of sigmoids",
       "next to torchtitan #2387", kSigmoid, all, placed("mlp.gate", gate), CaughtBy::kInvariance,
       "mlp.gate.weight"},
      {"RouterOfInputsUnreduced",
       "No rank sums the gradient of the router whose scores multiply inputs",
       "torchtitan #2387, etp 1", kLlama4, all, placed("feed_forward.router", gate),
       CaughtBy::kInvariance, "feed_forward.router.weight"},
  };
}

/// Experts that are cut by their inner size and not spread (ep 1): no rank has a sparse mesh then.
std::vector<Fault> of_cut_experts() {
  const Degrees whole{.tp = 2};
  const Degrees cut{.shard = 2, .tp = 2, .etp = 2};
  const Degrees all_cut{.tp = 2, .etp = 2};
  const auto summed_over_tp = [](const RankParts& rank) {
    const DataAxes data(rank.mesh.shapes(), 1.0);
    on_contracts(rank, "mlp.experts", [&](GradContract& each) {
      each.reductions = reductions_of(partial("tp", 2), data, each.name);
    });
  };
  return {
      {"CutExpertsOverAllRanks", "Experts cut over etp, ep 1, are summed over the ranks of tp, too",
       "Megatron-LM #1622", kQwen, cut, parts(summed_over_tp), CaughtBy::kSharding, "mlp.experts"},
      {"CutExpertsDeclaredWhole", "Experts cut over etp, ep 1, count as whole", "Megatron-LM #1622",
       kQwen, cut, placed("mlp.experts", partial("tp", 2)), CaughtBy::kSharding, "mlp.experts"},
      {"WholeExpertsNotOverTp", "Experts whole, ep 1, are summed over the dense group alone",
       "next to Megatron-LM #1622", kQwen, whole, placed("mlp.experts", invariant("tp", 2)),
       CaughtBy::kInvariance, "mlp.experts.down_proj"},
      {"FirstFactorOfCutExperts", "No rank sums A's gradient of experts with cut outputs",
       "next to Megatron-LM #1622", kQwen, all_cut,
       placed("experts.gate_up_proj.lora_A", invariant("tp", 2)), CaughtBy::kInvariance,
       "gate_up_proj.lora_A.weight", Setting::kAdapters, true},
      {"SecondFactorOfCutExperts", "No rank sums B's gradient of experts with cut inputs",
       "next to Megatron-LM #1622", kQwen, all_cut,
       placed("experts.down_proj.lora_B", invariant("tp", 2)), CaughtBy::kInvariance,
       "down_proj.lora_B.weight", Setting::kAdapters, true},
  };
}

constexpr std::int64_t kRotary = 8;  ///< rows of kv_a_proj_with_mqa that make the shared key

/// The layer sums the gradient of its latents, and not that of the key next to them.
void sum_latents_alone(const RankParts& rank) {
  place(rank, "kv_a_proj_with_mqa", invariant("tp", 2));
  on_raw_gradient(
      rank, "kv_a_proj_with_mqa.weight",
      [tp = parallel::axis_of(rank.mesh, "tp")](const at::Tensor& own) {
        const std::int64_t latents = own.size(0) - kRotary;
        return at::cat({parallel::exchange_sum(own.narrow(0, 0, latents).contiguous(), tp,
                                               std::nullopt, "latents by the layer"),
                        own.narrow(0, latents, kRotary)});
      });
}

/// Faults of parameters that cut heads share, and of their norms.
std::vector<Fault> of_heads() {
  const Degrees whole{.tp = 2, .sequence = false};
  const auto everywhere = invariant("tp", 2);
  return {
      {"HeadNormsUnreduced", "Norms of cut heads count as Invariant", "SkyRL #2226", kQwen, whole,
       placed("q_norm", everywhere), CaughtBy::kInvariance, "q_norm.weight"},
      {"SharedKeyUnreduced", "No rank sums the gradient of the key that cut heads share",
       "Megatron-LM #6839", kDeepseek, whole, parts(sum_latents_alone), CaughtBy::kInvariance,
       "kv_a_proj_with_mqa.weight"},
      {"LatentNormUnreduced", "The norm of latents that cut heads share counts as Invariant",
       "next to Megatron-LM #6839", kDeepseek, whole, placed("kv_a_layernorm", everywhere),
       CaughtBy::kInvariance, "kv_a_layernorm.weight"},
  };
}

std::vector<Fault> of_groups_of_experts() {
  const Degrees experts{.shard = 2, .ep = 2};
  const Degrees replicas{.replicate = 2, .shard = 2, .ep = 2};
  const auto without = [](std::string ending, std::vector<std::string> ReductionPlan::* axes) {
    return parts([=](const RankParts& rank) {
      on_contracts(rank, ending, [=](GradContract& each) { (each.reductions.*axes).clear(); });
    });
  };
  return {
      {"SharedExpertsOverTheSparseGroup",
       "Shared experts are summed over the ranks that have the same routed ones",
       "next to Megatron-LM #1622", kDeepseek, experts,
       without("shared_experts.down_proj", &ReductionPlan::shard_axes), CaughtBy::kSharding,
       "mlp.shared_experts.down_proj"},
      {"ReplicasOfExpertsUnreduced", "Replicas of experts are not summed",
       "next to Megatron-LM #1622", kQwen, replicas,
       without("mlp.experts", &ReductionPlan::replica_axes), CaughtBy::kSharding, "mlp.experts"},
      {"SharedExpertsDeclaredWhole",
       "Shared experts cut over tp count as whole",
       "Pai-Megatron-Patch #397",
       kDeepseek,
       {.tp = 2},
       placed("shared_experts.gate_proj", invariant("tp", 2)),
       CaughtBy::kSharding,
       "mlp.shared_experts.gate_proj"},
  };
}

}  // namespace

std::vector<Fault> faults_of_declarations() {
  std::vector<Fault> faults = of_routers();
  const Degrees sequence{.tp = 2};
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees experts{.shard = 2, .ep = 2};
  const auto wrong_group = [](const RankParts& rank) {
    on_contracts(rank, "mlp.experts",
                 [](GradContract& each) { each.reductions.shard_axes = {"dp_shard"}; });
  };
  const std::vector<Fault> others{
      {"NormsNotMarkedSequenceParallel", "Norms on sequence shards count as Invariant",
       "Megatron-LM #599, #619", kQwen, sequence, placed("input_layernorm", invariant("tp", 2)),
       CaughtBy::kInvariance, "input_layernorm.weight"},
      {"NormsSummedThoughInvariant", "Norms of the whole sequence are summed over tp",
       "Megatron-LM #7452", kQwen, whole, placed("input_layernorm", partial("tp", 2)),
       CaughtBy::kGradients, "input_layernorm.weight"},
      {"KeyHeadCopiesUnreduced",
       "Copies of one key head are not summed",
       "Megatron-LM #7452",
       kQwen,
       {.tp = 4},
       placed(
           "k_proj",
           {.axes = {{"tp_kv/2", 2, {PlacementKind::kShard}, {PlacementKind::kShard}},
                     {"tp_rep/2", 2, {PlacementKind::kInvariant}, {PlacementKind::kInvariant}}}}),
       CaughtBy::kInvariance,
       "k_proj.weight"},
      {"SinksNotMarkedAsCut", "Sinks cut by heads count as whole", "Megatron-LM #7452", kGptOss,
       sequence, placed("self_attn", invariant("tp", 2)), CaughtBy::kSharding,
       "model.layers.0.self_attn.sinks"},
      {"ExpertsOverTheDenseGroup", "Experts are summed over all data ranks, other experts' too",
       "Megatron-LM #1622", kQwen, experts, parts(wrong_group), CaughtBy::kSharding, "mlp.experts"},
      {"ExpertsDeclaredDense", "Experts cut over ep are declared on the dense mesh",
       "Megatron-LM #1622", kQwen, experts,
       parts([](const RankParts& rank) { declare(rank, "experts", {}); }), CaughtBy::kSharding,
       "mlp.experts"},
  };
  faults.insert(faults.end(), others.begin(), others.end());
  for (const auto& part : {of_cut_experts(), of_heads(), of_groups_of_experts()}) {
    faults.insert(faults.end(), part.begin(), part.end());
  }
  return faults;
}

}  // namespace tessera::golden
