// Gemma 4's config.json as the hub's published models spell it.
#include "models/gemma4/gemma4_config.h"
#include "models/gemma4/gemma4_layers.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

nlohmann::ordered_json text_json(const ModelSpec& spec) {
  const Gemma4Spec& gemma = *spec.gemma4;
  nlohmann::ordered_json json;
  json["attention_bias"] = false;
  json["attention_dropout"] = spec.attention_dropout;
  write_gemma4_layers(spec, json);
  json["bos_token_id"] = or_null(spec.bos_token_id);
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["enable_moe_block"] = spec.moe.has_value();
  json["eos_token_id"] = eos_token(spec.eos_token_ids);
  json["final_logit_softcapping"] = or_null(gemma.final_logit_softcapping);
  json["head_dim"] = spec.head_dim;
  json["hidden_activation"] = "gelu_pytorch_tanh";
  json["hidden_size"] = spec.hidden_size;
  json["hidden_size_per_layer_input"] = 0;
  json["initializer_range"] = spec.initializer_range;
  json["intermediate_size"] = spec.intermediate_size;
  json["max_position_embeddings"] = spec.max_position_embeddings;
  json["model_type"] = "gemma4_text";
  json["moe_intermediate_size"] = nullptr;
  json["num_attention_heads"] = spec.num_attention_heads;
  json["num_experts"] = nullptr;
  json["num_hidden_layers"] = spec.num_hidden_layers;
  json["num_key_value_heads"] = spec.num_key_value_heads;
  json["num_kv_shared_layers"] = 0;
  json["pad_token_id"] = or_null(spec.pad_token_id);
  json["rms_norm_eps"] = spec.rms_norm_eps;
  write_gemma4_rope(spec, json);
  json["sliding_window"] = gemma.sliding_window;
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  json["top_k_experts"] = nullptr;
  json["use_bidirectional_attention"] = nullptr;
  if (gemma.image_attention == ImageAttention::kBothWays) {
    json["use_bidirectional_attention"] = "vision";
  }
  json["use_cache"] = true;
  json["use_double_wide_mlp"] = false;
  json["vocab_size"] = spec.vocab_size;
  json["vocab_size_per_layer_input"] = spec.vocab_size;
  if (spec.moe) {
    json["moe_intermediate_size"] = spec.moe->moe_intermediate_size;
    json["num_experts"] = spec.moe->num_experts;
    json["top_k_experts"] = spec.moe->experts_per_token;
  }
  return json;
}

nlohmann::ordered_json vision_json(const ModelSpec& spec) {
  if (!spec.gemma4->vision) return nullptr;
  const Gemma4Vision& vision = *spec.gemma4->vision;
  nlohmann::ordered_json json;
  json["attention_bias"] = false;
  json["attention_dropout"] = vision.attention_dropout;
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["head_dim"] = vision.head_dim;
  json["hidden_activation"] = "gelu_pytorch_tanh";
  json["hidden_size"] = vision.hidden_size;
  json["initializer_range"] = spec.initializer_range;
  json["intermediate_size"] = vision.intermediate_size;
  json["model_type"] = "gemma4_vision";
  json["num_attention_heads"] = vision.num_attention_heads;
  json["num_hidden_layers"] = vision.num_hidden_layers;
  json["num_key_value_heads"] = vision.num_key_value_heads;
  json["patch_size"] = vision.patch_size;
  json["pooling_kernel_size"] = vision.pooling_kernel_size;
  json["position_embedding_size"] = vision.position_embedding_size;
  json["rms_norm_eps"] = vision.rms_norm_eps;
  json["rope_parameters"] = {{"rope_theta", vision.rope_theta}, {"rope_type", "axial"}};
  json["standardize"] = vision.standardize;
  json["use_clipped_linears"] = false;
  return json;
}

}  // namespace

nlohmann::ordered_json gemma4_json(const ModelSpec& spec) {
  const Gemma4Spec& gemma = *spec.gemma4;
  nlohmann::ordered_json json;
  json["architectures"] = {"Gemma4ForConditionalGeneration"};
  json["audio_config"] = nullptr;
  json["audio_token_id"] = or_null(gemma.audio_token_id);
  json["boa_token_id"] = or_null(gemma.boa_token_id);
  json["boi_token_id"] = or_null(gemma.boi_token_id);
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["eoa_token_index"] = or_null(gemma.eoa_token_index);
  json["eoi_token_id"] = or_null(gemma.eoi_token_id);
  json["image_token_id"] = gemma.image_token_id;
  json["initializer_range"] = spec.initializer_range;
  json["model_type"] = "gemma4";
  json["text_config"] = text_json(spec);
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  json["video_token_id"] = or_null(gemma.video_token_id);
  json["vision_config"] = vision_json(spec);
  if (!spec.tessera_tokenizer.empty()) json["tessera_tokenizer"] = spec.tessera_tokenizer;
  return json;
}

}  // namespace tessera::models
