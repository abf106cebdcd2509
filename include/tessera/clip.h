// Gradient norm and clipping over shards: every element once, whatever the layout.
#pragma once

#include <string>
#include <vector>

#include "tessera/shard.h"

namespace tessera {

/// L2 norm of all gradients of the model. Sums of squares are formed in fp64 over the owned ranges
/// (padding has no part in it) and added in rank order: the same value on every rank. Parameters
/// without gradient count as zero. Collective. Errors: kContract while deferred gradients are owed.
double gradient_norm(const ShardedBase& model);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, and
/// returns the norm before. max_norm <= 0 only measures. A norm that is not finite scales nothing.
/// Collective.
double clip_grad_norm(const ShardedBase& model, double max_norm);

/// Names of the first `most` parameters whose gradient (else whose value) is not finite on any
/// rank, in the model's order. Collective.
std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most);

}  // namespace tessera
