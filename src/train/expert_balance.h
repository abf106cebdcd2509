// Makes routers use all experts alike: by the auxiliary loss (model.aux_loss_coef), or without one
// by the biases that balance their load (model.load_balance_coeff).
//
// The loss is E * sum over experts of f * p: f is how many tokens chose the expert, p the mean of
// the routers' probabilities for it, both over all tokens and all layers with experts of a
// micro-batch, of every data rank. f is a number: the gradient flows through p only. Biases: a run
// that asks for them has the buffers of models/expert_bias.h; so has every reader of its
// checkpoints. Next: moe/routing.h, step.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "models/expert_tokens.h"
#include "models/model_spec.h"
#include "tessera/shard.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// The weight of the loss: `asked` (model.aux_loss_coef), else config.json's router_aux_loss_coef
/// where its output_router_logits is true, else 0. Errors: kConfig where it is asked of a model
/// without experts.
double aux_loss_coef(const std::optional<double>& asked, const models::ModelSpec& spec);

/// This rank's addend, [] fp32, before the weight: those of all ranks make the loss (no token is
/// counted by two of them).
/// Collective: one exchange of E numbers over all ranks.
at::Tensor auxiliary_loss(const ShardedBase& model, const std::vector<models::RouterLoad>& loads,
                          std::int64_t experts_per_token);
// Its parts, for the stages of a pipeline, which have some of the layers each:

/// The load of all layers together; undefined where there are none.
models::RouterLoad pool(const std::vector<models::RouterLoad>& loads);
/// How often each expert was chosen on all data ranks, [E] fp64, where `counts` [E] are, which are
/// this rank's. Collective.
at::Tensor chosen_by_all(const ShardedBase& model, const at::Tensor& counts);
/// The addend of these layers' probabilities [E]; `chosen` [E] fp64 of all layers of the model.
at::Tensor auxiliary_addend(const at::Tensor& probabilities, const at::Tensor& chosen,
                            std::int64_t experts_per_token);

/// How often the experts of the layers that are here were chosen on this rank, over micro-batches.
class ChosenExperts {
 public:
  /// Adds one micro-batch, one load a layer.
  void add(const std::vector<models::RouterLoad>& loads);
  /// The counts of all layers, concatenated, fp64; undefined where there are none.
  at::Tensor all() const;
  /// Those, once they are on the host.
  std::vector<std::vector<double>> by_layer(const at::Tensor& read) const;

 private:
  std::vector<at::Tensor> counts_;  // [E] fp64 each
};

/// The buffers that the source's model has besides those of the table: where `coefficient`
/// (model.load_balance_coeff) is above 0, or the folder holds them; none where its family's routers
/// have such a bias (models/expert_bias.h). Errors: kConfig for a
/// coefficient where the model has no experts, or trains adapters only.
std::vector<models::BufferSpec> expert_biases_of(const ModelSource& source, double coefficient);

/// Once a step, before the optimizer's: moves the biases of the layers that are here by `chosen`
/// (BatchLoss, of all layers of the source's model), which every rank has alike. Not collective.
void balance_experts(const ShardedBase& model, const ModelSource& source,
                     const std::vector<std::vector<double>>& chosen, double coefficient);

}  // namespace tessera::train
