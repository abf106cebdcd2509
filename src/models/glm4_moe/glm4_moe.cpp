// GLM 4.5, whole and Air: half of each head turns, biases on queries, keys and values, a first
// dense layer, a shared expert, and DeepSeek V3's router. The extra prediction layer of published
// folders is left out.
#include <nlohmann/json.hpp>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr double kHalf = 0.5;

void read_glm4_moe(ConfigReader& keys, ModelSpec& spec) {
  const double part = spec.rope.partial_rotary_factor;
  TESSERA_CHECK(part == kHalf || part == 1.0, ErrorKind::kConfig,
                "config.json partial_rotary_factor: found ", part, ", expected 0.5 or 1");
  if (part == kHalf && spec.head_dim % 4 != 0) {
    keys.refuse("head_dim", "a multiple of 4, whose half turns in pairs");
  }
  check_routed_experts(keys, spec);
}

}  // namespace

const FamilyTraits& glm4_moe_traits() {
  static const FamilyTraits traits{
      .model_type = "glm4_moe",
      .architecture = "Glm4MoeForCausalLM",
      .spec = {.family = Family::kGlm4Moe,
               .num_key_value_heads = 8,
               .max_position_embeddings = 131072,
               .rms_norm_eps = 1e-5,
               .use_qk_norm = false,
               .moe = MoeSpec{.num_experts = 128,
                              .experts_per_token = 8,
                              .moe_intermediate_size = 1408,
                              .shared_intermediate_size = 1408,
                              .scores = ExpertScores::kSigmoid,
                              .router_dtype = RouterDtype::kFloat32,
                              .norm_topk_prob = true,
                              .first_dense_layers = 1}},
      .partial_rotary_factor = kHalf,
      .rows = decoder_rows(joined({
          routed_expert_rows(),
          {
              only("moe_layer_freq", 1, kExpertsInEveryLayer),
              said("num_nextn_predict_layers", 0),
              turned_part_row(),
              only("scoring_func", "sigmoid", kSigmoidScores),
              only("topk_method", "noaux_tc", kChoiceByBias),
              row("use_qk_norm", &ModelSpec::use_qk_norm, {}, Null::kAbsent),
          },
      })),
      .read = read_glm4_moe,
      .read_prediction_layers = read_prediction_layers,
      .router_module = "gate",
      .moe_names = {.peft_takes_mlp_for_experts = true},
      .pins = sigmoid_router_pins(),
      .output_bias = false,
  };
  return traits;
}

}  // namespace tessera::models
