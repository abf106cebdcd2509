// Gradient norm and clipping over shards: every element counts once, in any layout. Next: optim.h.
#pragma once

#include <string>
#include <vector>

#include "tessera/shard.h"

namespace tessera {

/// Returns the p-norm of all gradients of the model as one vector; p = infinity gives the largest
/// absolute value. Powers are formed and added in fp64 over the ranges that each rank owns, without
/// padding, and then in rank order, so every rank has the same value. Parameters without gradient
/// count as zero. Collective. Errors: kUsage for p that is not above 0, while reductions wait for
/// the last backward, and while micro-batches without sync wait to be reduced; kContract while
/// deferred weight gradients are pending.
double gradient_norm(const ShardedBase& model, double p = 2.0);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, and
/// returns the norm from before the scaling. max_norm <= 0 only measures. A norm that is not finite
/// scales nothing.
/// Collective. Errors: as gradient_norm.
double clip_grad_norm(const ShardedBase& model, double max_norm, double p = 2.0);

/// Returns the names of the first `most` parameters that have a gradient, or else a value, that is
/// not finite on some rank, in the model's order. Collective.
std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most);

/// Returns the names of the parameters whose gradients differ between ranks although their layer
/// declares them invariant (I), compared bit for bit, in the model's order. Such a layer sums too
/// little or too much. Reads the gradients that the shards have accumulated, before the sum over
/// replicas. Collective.
std::vector<std::string> check_invariant_gradients(const ShardedBase& model);

}  // namespace tessera
