// The keys of a config.json about mixtures of experts that several families share.
//
// Private to the families' readers. Next: moe_spec.h, qwen3_moe.cpp, gpt_oss.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "models/config_reader.h"
#include "models/moe_spec.h"

namespace tessera::models {

/// num_experts or num_local_experts, and num_experts_per_tok. Errors: kConfig for both with
/// different values, for neither, for more chosen than there are.
void read_expert_counts(ConfigReader& keys, MoeSpec& moe);

/// router_aux_loss_coef and output_router_logits.
void read_aux_loss(ConfigReader& keys, MoeSpec& moe);
void write_aux_loss(const MoeSpec& moe, nlohmann::ordered_json& json);

}  // namespace tessera::models
