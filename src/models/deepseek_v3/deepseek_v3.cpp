// DeepSeek V3 and R1, and Kimi K2, which is the same with other numbers: latent attention, first
// dense layers, a shared expert, and a router of sigmoids whose choice a stored bias balances, from
// the best groups of experts. The extra prediction layer of published folders is left out, their
// blocks of eight bits are read as bfloat16 (io/unpacked/fp8_tensors.h).
#include <nlohmann/json.hpp>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

/// The files themselves say which tensors are packed.
void check_fp8(ConfigReader& keys) {
  const nlohmann::json* record = keys.take("quantization_config");
  if (record == nullptr) return;
  const std::string expected =
      "a record with quant_method \"fp8\", fmt \"e4m3\" and weight_block_size, or none";
  if (!record->is_object() || record->value("quant_method", nlohmann::json()) != "fp8" ||
      record->value("fmt", nlohmann::json("e4m3")) != "e4m3") {
    keys.refuse("quantization_config", expected);
  }
  // How activations and scales were rounded when the model was served says nothing of the weights.
  for (const auto& [key, value] : record->items()) {
    if (key == "quant_method" || key == "fmt" || key == "weight_block_size" ||
        key == "activation_scheme" || key == "scale_fmt") {
      continue;
    }
    keys.refuse("quantization_config", expected);
  }
}

void read_deepseek_v3(ConfigReader& keys, ModelSpec& spec) {
  settle_latent_attention(keys, spec);
  check_routed_experts(keys, spec);
  check_fp8(keys);
}

}  // namespace

const FamilyTraits& deepseek_v3_traits() {
  static const FamilyTraits traits{
      .model_type = "deepseek_v3",
      .architecture = "DeepseekV3ForCausalLM",
      .other_model_types = {"kimi_k2"},
      .spec = {.family = Family::kDeepseekV3,
               .num_key_value_heads = 128,
               .head_dim = 64,
               .max_position_embeddings = 4096,
               .moe = MoeSpec{.num_experts = 256,
                              .experts_per_token = 8,
                              .moe_intermediate_size = 2048,
                              .shared_intermediate_size = 2048,
                              .scores = ExpertScores::kSigmoid,
                              .router_dtype = RouterDtype::kFloat32,
                              .norm_topk_prob = true,
                              .routed_scaling_factor = 2.5,
                              .n_group = 8,
                              .topk_group = 4,
                              .first_dense_layers = 3},
               .mla = kAbsentMla},
      .rows = decoder_rows(joined({
          latent_attention_rows(),
          routed_expert_rows(),
          {
              always("moe_layer_freq", 1, kExpertsInEveryLayer),
              said("num_nextn_predict_layers", 0),
              always("scoring_func", "sigmoid", kSigmoidScores),
              always("topk_method", "noaux_tc", kChoiceByBias),
              only("rope_interleave", true, "rope pairs neighbours"),
          },
      })),
      .read = read_deepseek_v3,
      .read_prediction_layers = read_prediction_layers,
      .router_module = "gate",
      .moe_names = {.peft_takes_mlp_for_experts = true},
      .pins = sigmoid_router_pins(),
  };
  return traits;
}

}  // namespace tessera::models
