// The bias on the choice of experts in the layers of a model that has just been made.
//
// A buffer [E] fp32 a layer with experts, `model.layers.N.mlp.expert_bias`, zeros to begin with.
// Families have none of their own and files of Hugging Face hold none: training with
// model.load_balance_coeff adds it, and our checkpoints keep it. Next: ../moe/load_balance.h, which
// makes the next one.
#pragma once

#include <vector>

#include "models/description.h"
#include "models/language_model.h"

namespace tessera::models {

/// One a layer with experts, in their order; none for families whose layers cannot have it.
std::vector<BufferSpec> expert_biases(const ModelSpec& spec);

/// Before the model is sharded.
void add_expert_biases(LanguageModel& model);

}  // namespace tessera::models
