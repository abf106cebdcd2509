// Mixtral: a mixture of experts in the place of every MLP, softmax over all experts, the weights of
// the chosen divided by their sum. Its own names: block_sparse_moe, and w1, w3, w2 for gate, up and
// down.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mixtral(ConfigReader& keys, ModelSpec& spec) {
  read_expert_counts(keys, spec);
  spec.moe->moe_intermediate_size = spec.intermediate_size;
  if (spec.sliding_window > 0) set_all_sliding(spec);
}

}  // namespace

const FamilyTraits& mixtral_traits() {
  static const FamilyTraits traits{
      .model_type = "mixtral",
      .architecture = "MixtralForCausalLM",
      .spec = {.family = Family::kMixtral,
               .num_key_value_heads = 8,
               .max_position_embeddings = 131072,
               .rms_norm_eps = 1e-5,
               .rope = {.theta = 1e6},
               .moe = MoeSpec{.norm_topk_prob = true,
                              .router_aux_loss_coef = 0.001,
                              .wide_weights = true}},
      .rows = decoder_rows({
          only("attention_bias", false, "attention of this family has no bias"),
          only("router_jitter_noise", 0.0, "noise on what the router sees is not supported"),
          written("num_experts_per_tok", &MoeSpec::experts_per_token),
          written("num_local_experts", &MoeSpec::num_experts),
          window_row(),
          row("output_router_logits", &MoeSpec::output_router_logits),
          row("router_aux_loss_coef", &MoeSpec::router_aux_loss_coef, kAuxLoss),
      }),
      .read = read_mixtral,
      .router_module = "gate",
      .moe_names = {.module = "block_sparse_moe",
                    .gate = "w1.weight",
                    .up = "w3.weight",
                    .down = "w2.weight",
                    .module_in_transformers = "mlp"},
  };
  return traits;
}

}  // namespace tessera::models
