// Qwen3 with a mixture of experts in the place of most MLPs: softmax over all experts, the weights
// of the chosen divided by their sum where norm_topk_prob says so.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mlp_only_layers(ConfigReader& keys, ModelSpec& spec) {
  spec.moe->mlp_only_layers = keys.integers("mlp_only_layers", {0, spec.num_hidden_layers - 1});
}

}  // namespace

const FamilyTraits& qwen3_moe_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3_moe",
      .architecture = "Qwen3MoeForCausalLM",
      .spec = {.family = Family::kQwen3Moe,
               .num_key_value_heads = 4,
               .max_position_embeddings = 32768,
               .moe = MoeSpec{.router_aux_loss_coef = 0.001}},
      .rows = decoder_rows({
          row("decoder_sparse_step", &MoeSpec::sparse_step, kLayers),
          written({"mlp_only_layers", read_mlp_only_layers},
                  [](const ModelSpec& spec) { return spec.moe->mlp_only_layers; }),
          size("moe_intermediate_size", &MoeSpec::moe_intermediate_size),
          row("norm_topk_prob", &MoeSpec::norm_topk_prob),
          written("num_experts", &MoeSpec::num_experts),
          written("num_experts_per_tok", &MoeSpec::experts_per_token),
          row("output_router_logits", &MoeSpec::output_router_logits),
          row("router_aux_loss_coef", &MoeSpec::router_aux_loss_coef, kAuxLoss),
      }),
      .read = read_expert_counts,
      .router_module = "gate",
      .qk_norm = true,
  };
  return traits;
}

}  // namespace tessera::models
