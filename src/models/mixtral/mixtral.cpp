// Mixtral: a mixture of experts in the place of every MLP, softmax over all experts, the weights of
// the chosen divided by their sum. Its own names: block_sparse_moe, and w1, w3, w2 for gate, up and
// down.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mixtral(ConfigReader& keys, ModelSpec& spec) {
  keys.expect("attention_bias", false, "attention of this family has no bias");
  keys.expect("router_jitter_noise", 0.0, "noise on what the router sees is not supported");
  MoeSpec& moe = spec.moe.emplace();
  read_expert_counts(keys, moe);
  moe.moe_intermediate_size = spec.intermediate_size;
  moe.norm_topk_prob = true;
  moe.wide_weights = true;
  moe.router_aux_loss_coef = 0.001;
  read_aux_loss(keys, moe);
  if (!keys.contains("rms_norm_eps")) spec.rms_norm_eps = 1e-5;
  // Of all layers, where there is one.
  const auto window = keys.integer("sliding_window", kSize);
  if (!window) return;
  spec.sliding_window = *window;
  spec.layer_types.assign(static_cast<std::size_t>(spec.num_hidden_layers), LayerType::kSliding);
}

void write_mixtral(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const MoeSpec& moe = *spec.moe;
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["num_local_experts"] = moe.num_experts;
  json["sliding_window"] = nullptr;
  if (spec.sliding_window > 0) json["sliding_window"] = spec.sliding_window;
  write_aux_loss(moe, json);
}

}  // namespace

const FamilyTraits& mixtral_traits() {
  static const FamilyTraits traits{
      .family = Family::kMixtral,
      .model_type = "mixtral",
      .architecture = "MixtralForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = 8,
      .default_max_position_embeddings = 131072,
      .default_rope_theta = 1e6,
      .has_mlp_bias = false,
      .own_keys = {"attention_bias", "sliding_window"},
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .router_module = "gate",
      .read = read_mixtral,
      .write = write_mixtral,
      .moe_names = {.module = "block_sparse_moe",
                    .gate = "w1.weight",
                    .up = "w3.weight",
                    .down = "w2.weight",
                    .module_in_transformers = "mlp"},
  };
  return traits;
}

}  // namespace tessera::models
