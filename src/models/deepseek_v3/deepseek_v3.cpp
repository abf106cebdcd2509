// DeepSeek V3 and R1: latent attention, first dense layers, a shared expert, and a router of sigmoids
// whose choice a stored bias balances, from the best groups of experts. The extra prediction layer of
// published folders is left out, their blocks of eight bits are read as bfloat16
// (io/unpacked/fp8_tensors.h).
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
  read_latent_attention(keys, spec);
  read_routed_experts(keys, spec,
                      {.experts = 256,
                       .experts_per_token = 8,
                       .inner = 2048,
                       .shared = 1,
                       .first_dense = 3,
                       .scaling = 2.5});
  read_sigmoid_router(keys, {.groups = 8, .kept = 4}, *spec.moe);
  keys.expect("rope_interleave", true, "rope pairs neighbours");
  check_fp8(keys);
}

void write_deepseek_v3(const ModelSpec& spec, nlohmann::ordered_json& json) {
  write_latent_attention(spec, json);
  write_routed_experts(*spec.moe, json);
  json["moe_layer_freq"] = 1;
  json["num_nextn_predict_layers"] = 0;
  json["scoring_func"] = "sigmoid";
  json["topk_method"] = "noaux_tc";
}

}  // namespace

const FamilyTraits& deepseek_v3_traits() {
  static const FamilyTraits traits{
      .family = Family::kDeepseekV3,
      .model_type = "deepseek_v3",
      .architecture = "DeepseekV3ForCausalLM",
      .default_head_dim = 64,
      .default_num_key_value_heads = 128,
      .default_max_position_embeddings = 4096,
      .has_mlp_bias = false,
      .own_keys = {"quantization_config"},
      .pins = {.strict = {"e_score_correction_bias"},
               .under_float16 = {},
               .strict_of_routers = true},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .read_prediction_layers = read_prediction_layers,
      .router_module = "gate",
      .read = read_deepseek_v3,
      .write = write_deepseek_v3,
  };
  return traits;
}

}  // namespace tessera::models
