// Qwen3 with a mixture of experts in the place of most MLPs: softmax over all experts, the weights
// of the chosen divided by their sum where norm_topk_prob says so.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_qwen3_moe(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = spec.moe.emplace();
  read_expert_counts(keys, moe);
  moe.moe_intermediate_size = required(keys, "moe_intermediate_size", kSize);
  moe.norm_topk_prob = keys.boolean("norm_topk_prob").value_or(false);
  moe.sparse_step = keys.integer("decoder_sparse_step", kLayers).value_or(1);
  moe.mlp_only_layers = keys.integers("mlp_only_layers", {0, spec.num_hidden_layers - 1});
  moe.router_aux_loss_coef = 0.001;
  read_aux_loss(keys, moe);
}

void write_qwen3_moe(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const MoeSpec& moe = *spec.moe;
  json["decoder_sparse_step"] = moe.sparse_step;
  json["mlp_only_layers"] = moe.mlp_only_layers;
  json["moe_intermediate_size"] = moe.moe_intermediate_size;
  json["norm_topk_prob"] = moe.norm_topk_prob;
  json["num_experts"] = moe.num_experts;
  json["num_experts_per_tok"] = moe.experts_per_token;
  write_aux_loss(moe, json);
}

}  // namespace

const FamilyTraits& qwen3_moe_traits() {
  static const FamilyTraits traits{
      .family = Family::kQwen3Moe,
      .model_type = "qwen3_moe",
      .architecture = "Qwen3MoeForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = 4,
      .default_max_position_embeddings = 32768,
      .has_mlp_bias = false,
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .router_module = "gate",
      .qk_norm = true,
      .read = read_qwen3_moe,
      .write = write_qwen3_moe,
  };
  return traits;
}

}  // namespace tessera::models
