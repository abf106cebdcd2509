// Qwen3 with a mixture of experts in the place of most MLPs: softmax over all experts, the weights
// of the chosen divided by their sum where norm_topk_prob says so.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/qwen3_moe/qwen_expert_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {

const FamilyTraits& qwen3_moe_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3_moe",
      .architecture = "Qwen3MoeForCausalLM",
      .spec = {.family = Family::kQwen3Moe,
               .num_key_value_heads = 4,
               .max_position_embeddings = 32768,
               .moe = MoeSpec{.router_aux_loss_coef = 0.001}},
      .rows = decoder_rows(qwen_expert_rows()),
      .read = read_expert_counts,
      .router_module = "gate",
      .moe_names = {.peft_takes_mlp_for_experts = true},
      .qk_norm = true,
  };
  return traits;
}

}  // namespace tessera::models
