// Gradient norm and clipping over shards: every element once, whatever the layout.
#pragma once

#include <string>
#include <vector>

#include "tessera/shard.h"

namespace tessera {

/// The p-norm of all gradients of the model, as one vector; infinity gives the largest absolute
/// value. Powers are formed and added in fp64 over the owned ranges (padding has no part in it, and
/// no element counts twice) and then in rank order: the same value on every rank. Parameters
/// without gradient count as zero. Collective. Errors: kUsage for p that is not above 0, while
/// reductions wait for the last backward and while micro-batches without sync wait to be reduced;
/// kContract while deferred gradients are owed.
double gradient_norm(const ShardedBase& model, double p = 2.0);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, and
/// returns the norm before. max_norm <= 0 only measures. A norm that is not finite scales nothing.
/// Collective. Errors: as gradient_norm.
double clip_grad_norm(const ShardedBase& model, double max_norm, double p = 2.0);

/// Names of the first `most` parameters whose gradient (else whose value) is not finite on any
/// rank, in the model's order. Collective.
std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most);

/// Names of the parameters whose gradients differ between ranks for which their layer declares that
/// they are the same (I), bit for bit, in the model's order: a layer that sums too little or too
/// much. Reads what the shards have accumulated, before the sum over replicas. Collective.
std::vector<std::string> check_invariant_gradients(const ShardedBase& model);

}  // namespace tessera
