// Balancing the load of experts without an auxiliary loss (model.load_balance_coeff): which runs
// do, and the step that they take.
//
// A run that asks for it has the buffers of models/expert_bias.h; so has whatever reads one of its
// checkpoints. Next: moe/load_balance.h.
#pragma once

#include <vector>

#include "tessera/shard.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// The buffers that the source's model has besides those of the table: where `coefficient`
/// (model.load_balance_coeff) is above 0, or the folder holds them. Errors: kConfig for a
/// coefficient where the model has no experts, or trains adapters only.
std::vector<models::BufferSpec> expert_biases_of(const ModelSource& source, double coefficient);

/// Once a step, before the optimizer's: moves the biases by `chosen` (BatchLoss), which every rank
/// has alike. Not collective.
void balance_experts(const ShardedBase& model, const std::vector<std::vector<double>>& chosen,
                     double coefficient);

}  // namespace tessera::train
