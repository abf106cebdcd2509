// The auxiliary loss of mixtures of experts: what makes routers use all experts alike.
//
// E * sum over experts of f * p: f is how many tokens chose the expert, p the mean of the routers'
// probabilities for it, both over all tokens and all layers with experts of a micro-batch, of every
// data rank. f is a number: the gradient flows through p only. Next: step.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "models/model_spec.h"
#include "models/routing_request.h"
#include "tessera/shard.h"

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

}  // namespace tessera::train
