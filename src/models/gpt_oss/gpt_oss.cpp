// gpt-oss: attention with sinks, sliding and full layers in turn, biases everywhere, experts with
// a clamped gate that the router chooses by raw scores.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Experts of published files are packed; the files themselves say which tensors are, and in which
/// form.
void check_quantization(ConfigReader& keys) {
  const nlohmann::json* record = keys.take("quantization_config");
  if (record == nullptr) return;
  if (!record->is_object()) keys.refuse("quantization_config", "an object or null");
  const auto method = record->find("quant_method");
  if (method == record->end() || *method != "mxfp4") {
    keys.refuse("quantization_config", "quant_method \"mxfp4\", or no quantization_config");
  }
  for (const auto& [key, value] : record->items()) {
    if (key == "quant_method" || key == "modules_to_not_convert") continue;
    keys.refuse("quantization_config", "the keys quant_method and modules_to_not_convert only");
  }
}

void read_gpt_oss(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = spec.moe.emplace();
  read_expert_counts(keys, moe);
  keys.expect("experts_per_token", moe.experts_per_token, "num_experts_per_tok");
  moe.moe_intermediate_size = spec.intermediate_size;
  moe.scores = ExpertScores::kSoftmaxOfChosen;
  moe.router_bias = true;
  moe.activation = ExpertActivation::kClampedSwiglu;
  moe.swiglu_alpha = keys.number("swiglu_alpha", {1e-6, 1e6}).value_or(1.702);
  moe.swiglu_limit = keys.number("swiglu_limit", {1e-6, 1e30}).value_or(7.0);
  moe.expert_bias = true;
  moe.layout = ExpertLayout::kInOut;
  moe.router_aux_loss_coef = 0.001;
  read_aux_loss(keys, moe);
  spec.sliding_window =
      keys.contains("sliding_window") ? required(keys, "sliding_window", kSize) : 128;
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    spec.layer_types.push_back(i % 2 == 0 ? LayerType::kSliding : LayerType::kFull);
  }
  read_layer_types(keys, spec);
  if (!keys.contains("rms_norm_eps")) spec.rms_norm_eps = 1e-5;
  if (!keys.contains("attention_bias")) spec.attention_bias = true;
  if (keys.take("rope_parameters") == nullptr && keys.take("rope_scaling") == nullptr) {
    keys.refuse("rope_scaling", "a record, as that of yarn");
  }
  keys.expect("initial_context_length", spec.rope.original_max_position_embeddings,
              "the original_max_position_embeddings of rope_scaling");
  check_quantization(keys);
}

void write_gpt_oss(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const MoeSpec& moe = *spec.moe;
  json["experts_per_token"] = moe.experts_per_token;
  if (spec.rope.original_max_position_embeddings > 0) {
    json["initial_context_length"] = spec.rope.original_max_position_embeddings;
  }
  json["layer_types"] = layer_types_json(spec.layer_types);
  if (spec.rope.type == nn::RopeType::kDefault) json["rope_scaling"] = {{"rope_type", "default"}};
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["num_local_experts"] = moe.num_experts;
  json["sliding_window"] = spec.sliding_window;
  json["swiglu_alpha"] = moe.swiglu_alpha;
  json["swiglu_limit"] = moe.swiglu_limit;
  write_aux_loss(moe, json);
}

}  // namespace

const FamilyTraits& gpt_oss_traits() {
  static const FamilyTraits traits{
      .family = Family::kGptOss,
      .model_type = "gpt_oss",
      .architecture = "GptOssForCausalLM",
      .default_head_dim = 64,
      .default_num_key_value_heads = 8,
      .default_max_position_embeddings = 131072,
      .default_rope_theta = 150000.0,
      .has_mlp_bias = false,
      .own_keys = {"layer_types", "quantization_config", "sliding_window"},
      .pins = {.strict = {},
               .under_float16 = {"post_attention_layernorm", "input_layernorm", "norm"}},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .router_module = "router",
      .attention_sinks = true,
      .norm_rounds_once = true,
      .read = read_gpt_oss,
      .write = write_gpt_oss,
  };
  return traits;
}

}  // namespace tessera::models
