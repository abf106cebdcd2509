// The config keys that DeepSeek V2 and V3, and models that follow them (GLM 4.5), share: latent
// attention, routed and shared experts, groups of them, the router of sigmoids.
//
// Private to those families' readers. Next: ../spec_keys.h, ../deepseek_v3/deepseek_v3.cpp.
#pragma once

#include <cstdint>

#include "models/family.h"
#include "models/keys/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// transformers' values for keys that are absent.
inline constexpr MlaSpec kAbsentMla{.q_lora_rank = 1536,
                                    .kv_lora_rank = 512,
                                    .qk_nope_head_dim = 128,
                                    .qk_rope_head_dim = 64,
                                    .v_head_dim = 128};
KeyRows latent_attention_rows();
/// Sets head_dim and checks that the sizes agree. Errors: kConfig.
void settle_latent_attention(ConfigReader& keys, ModelSpec& spec);

/// The numbers and sizes of routed and shared experts, and the router's.
KeyRows routed_expert_rows();
inline constexpr const char* kExpertsInEveryLayer =
    "every layer after the first dense ones has experts";
/// Errors: kConfig where groups do not divide the experts, or a token does not find enough of them.
void check_routed_experts(ConfigReader& keys, const ModelSpec& spec);

// The router of DeepSeek V3: sigmoids, a stored bias, groups by their two best experts.
inline constexpr const char* kSigmoidScores = "the scores of this family";
inline constexpr const char* kChoiceByBias = "how this family chooses experts";
KeepInFloat32 sigmoid_router_pins();

/// num_nextn_predict_layers: ParsedSpec::prediction_layers. Without the key there are none.
std::int64_t read_prediction_layers(ConfigReader& keys);

}  // namespace tessera::models
