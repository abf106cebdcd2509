// gpt-oss: attention with sinks, sliding and full layers in turn, biases everywhere, experts with
// a clamped gate that the router chooses by raw scores.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
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
  read_expert_counts(keys, spec);
  spec.moe->moe_intermediate_size = spec.intermediate_size;
  keys.expect("experts_per_token", spec.moe->experts_per_token, "num_experts_per_tok");
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    spec.layer_types.push_back(i % 2 == 0 ? LayerType::kSliding : LayerType::kFull);
  }
  read_layer_types(keys, spec);
  if (keys.take("rope_parameters") == nullptr && keys.take("rope_scaling") == nullptr) {
    keys.refuse("rope_scaling", "a record, as that of yarn");
  }
  keys.expect("initial_context_length", spec.rope.original_max_position_embeddings,
              "the original_max_position_embeddings of rope_scaling");
  check_quantization(keys);
}

Json context_length(const ModelSpec& spec) {
  const std::int64_t length = spec.rope.original_max_position_embeddings;
  return length > 0 ? Json(length) : left_out();
}

Json scaling(const ModelSpec& spec) {
  if (spec.rope.type == nn::RopeType::kDefault) return {{"rope_type", "default"}};
  return rope_scaling_json(spec.rope, "rope_type");
}

}  // namespace

const FamilyTraits& gpt_oss_traits() {
  static const FamilyTraits traits{
      .model_type = "gpt_oss",
      .architecture = "GptOssForCausalLM",
      .spec = {.family = Family::kGptOss,
               .num_key_value_heads = 8,
               .head_dim = 64,
               .max_position_embeddings = 131072,
               .rms_norm_eps = 1e-5,
               .attention_bias = true,
               .rope = {.theta = 150000.0},
               .sliding_window = 128,
               .moe = MoeSpec{.scores = ExpertScores::kSoftmaxOfChosen,
                              .router_bias = true,
                              .activation = ExpertActivation::kClampedSwiglu,
                              .expert_bias = true,
                              .layout = ExpertLayout::kInOut,
                              .router_aux_loss_coef = 0.001}},
      .rows = decoder_rows({
          written("experts_per_token", &MoeSpec::experts_per_token),
          written({"initial_context_length"}, context_length),
          written({"layer_types"}, layer_types_json),
          written({"rope_scaling"}, scaling),
          written("num_experts_per_tok", &MoeSpec::experts_per_token),
          written("num_local_experts", &MoeSpec::num_experts),
          size("sliding_window", &ModelSpec::sliding_window),
          row("swiglu_alpha", &MoeSpec::swiglu_alpha, {1e-6, 1e6}),
          row("swiglu_limit", &MoeSpec::swiglu_limit, {1e-6, 1e30}),
          row("output_router_logits", &MoeSpec::output_router_logits),
          row("router_aux_loss_coef", &MoeSpec::router_aux_loss_coef, kAuxLoss),
      }),
      .read = read_gpt_oss,
      .router_module = "router",
      .pins = {.strict = {},
               .under_float16 = {"post_attention_layernorm", "input_layernorm", "norm"}},
      .norm_rounds_once = true,
      .attention_sinks = true,
  };
  return traits;
}

}  // namespace tessera::models
