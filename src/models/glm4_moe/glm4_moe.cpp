// GLM 4.5, whole and Air: half of each head turns, biases on queries, keys and values, a first dense
// layer, a shared expert, and DeepSeek V3's router. The extra prediction layer of published folders
// is left out.
#include <nlohmann/json.hpp>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr double kHalf = 0.5;

void read_glm4_moe(ConfigReader& keys, ModelSpec& spec) {
  if (!keys.contains("rms_norm_eps")) spec.rms_norm_eps = 1e-5;
  spec.use_qk_norm = keys.boolean("use_qk_norm").value_or(false);
  const double part = spec.rope.partial_rotary_factor;
  TESSERA_CHECK(part == kHalf || part == 1.0, ErrorKind::kConfig,
                "config.json partial_rotary_factor: found ", part, ", expected 0.5 or 1");
  if (part == kHalf && spec.head_dim % 4 != 0) {
    keys.refuse("head_dim", "a multiple of 4, whose half turns in pairs");
  }
  read_routed_experts(
      keys, spec,
      {.experts = 128, .experts_per_token = 8, .inner = 1408, .shared = 1, .first_dense = 1});
  read_sigmoid_router(keys, {.groups = 1, .kept = 1}, *spec.moe);
}

void write_glm4_moe(const ModelSpec& spec, nlohmann::ordered_json& json) {
  write_routed_experts(*spec.moe, json);
  json["num_nextn_predict_layers"] = 0;
  json["partial_rotary_factor"] = spec.rope.partial_rotary_factor;
  json["use_qk_norm"] = spec.use_qk_norm.value_or(false);
}

}  // namespace

const FamilyTraits& glm4_moe_traits() {
  static const FamilyTraits traits{
      .family = Family::kGlm4Moe,
      .model_type = "glm4_moe",
      .architecture = "Glm4MoeForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = 8,
      .default_max_position_embeddings = 131072,
      .default_partial_rotary_factor = kHalf,
      .has_mlp_bias = false,
      .pins = {.strict = {"e_score_correction_bias"},
               .under_float16 = {},
               .strict_of_routers = true},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .read_prediction_layers = read_prediction_layers,
      .router_module = "gate",
      .output_bias = false,
      .read = read_glm4_moe,
      .write = write_glm4_moe,
  };
  return traits;
}

}  // namespace tessera::models
