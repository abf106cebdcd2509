// What the configs of DeepSeek V2 and V3, and of models that follow them (GLM 4.5), say in the same
// keys: latent attention, routed and shared experts, groups of them, the router of sigmoids.
//
// Private to those families' readers. Next: ../spec_keys.h, ../deepseek_v3/deepseek_v3.cpp.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "models/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// Into spec.mla and head_dim. Errors: kConfig.
void read_latent_attention(ConfigReader& keys, ModelSpec& spec);
void write_latent_attention(const ModelSpec& spec, nlohmann::ordered_json& json);

/// transformers' values for keys that are absent.
struct RoutedExpertDefaults {
  std::optional<std::int64_t> experts = std::nullopt;  ///< none: the key is needed, as the next
  std::optional<std::int64_t> experts_per_token = std::nullopt;
  std::int64_t inner = 0;
  std::int64_t shared = 0;
  std::int64_t first_dense = 0;
  double scaling = 1.0;
};
/// Their numbers and sizes into spec.moe, which is made; of the router its dtype and scaling factor.
void read_routed_experts(ConfigReader& keys, ModelSpec& spec, const RoutedExpertDefaults& absent);
void write_routed_experts(const MoeSpec& moe, nlohmann::ordered_json& json);

/// n_group and topk_group as a config has them.
struct ExpertGroups {
  std::optional<std::int64_t> groups;
  std::optional<std::int64_t> kept;  ///< of them, those of a token
};
ExpertGroups read_expert_groups(ConfigReader& keys);
/// Errors: kConfig where they do not divide the experts, or a token does not find enough of them.
void set_expert_groups(ConfigReader& keys, const ExpertGroups& found, MoeSpec& moe);

/// The router of DeepSeek V3: sigmoids, a stored bias, groups by their two best experts. `absent`:
/// the groups of absent keys.
void read_sigmoid_router(ConfigReader& keys, const ExpertGroups& absent, MoeSpec& moe);

/// num_nextn_predict_layers: ParsedSpec::prediction_layers. Without the key there are none.
std::int64_t read_prediction_layers(ConfigReader& keys);

}  // namespace tessera::models
