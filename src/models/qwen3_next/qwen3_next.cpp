// Qwen3-Next: linear attention by the gated delta rule in most layers, full attention with an
// output gate in every fourth; experts with one gated shared expert; norms that multiply by 1 +
// weight. The extra prediction layer of published folders is left out.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/qwen3_moe/qwen_expert_keys.h"
#include "models/qwen3_next/delta_net_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_qwen3_next(ConfigReader& keys, ModelSpec& spec) {
  read_delta_net(keys, spec);
  read_expert_counts(keys, spec);
}

}  // namespace

const FamilyTraits& qwen3_next_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3_next",
      .architecture = "Qwen3NextForCausalLM",
      .spec = {.family = Family::kQwen3Next,
               .num_key_value_heads = 2,
               .head_dim = 256,
               .max_position_embeddings = 32768,
               .moe = MoeSpec{.moe_intermediate_size = 512,
                              .shared_intermediate_size = 512,
                              .shared_gate = true,
                              .norm_topk_prob = true,
                              .router_aux_loss_coef = 0.001},
               .delta_net = DeltaNetSpec{}},
      .partial_rotary_factor = kTurnedPartOfDeltaNet,
      .rows = decoder_rows(
          joined({qwen_expert_rows(),
                  delta_net_rows(),
                  {size("shared_expert_intermediate_size", &MoeSpec::shared_intermediate_size)}})),
      .read = read_qwen3_next,
      .module_name = without_prediction,
      .layer_keys = kDeltaNetLayerKeys,
      .router_module = "gate",
      .shared_module = "shared_expert",
      .moe_names = {.peft_takes_mlp_for_experts = true},
      .pins = delta_net_pins(),
      .norm_adds_one = true,
      .norm_rounds_once = true,
      .qk_norm = true,
      .attention_gate = true,
  };
  return traits;
}

}  // namespace tessera::models
