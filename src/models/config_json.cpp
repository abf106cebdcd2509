// config.json as the hub's published models spell it.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/model_spec.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
std::string config_json(const ModelSpec& spec) {
  const FamilyTraits& family = traits(spec.family);
  if (family.write_all != nullptr) return family.write_all(spec).dump(2) + "\n";
  nlohmann::ordered_json json;
  json["architectures"] = {family.architecture};
  if (!family.owns("attention_bias")) json["attention_bias"] = spec.attention_bias;
  json["attention_dropout"] = spec.attention_dropout;
  json["bos_token_id"] = or_null(spec.bos_token_id);
  json["eos_token_id"] = eos_token(spec.eos_token_ids);
  json["head_dim"] = spec.head_dim;
  json["hidden_act"] = "silu";
  json["hidden_size"] = spec.hidden_size;
  json["initializer_range"] = spec.initializer_range;
  json["intermediate_size"] = spec.intermediate_size;
  json["max_position_embeddings"] = spec.max_position_embeddings;
  if (family.has_mlp_bias) json["mlp_bias"] = spec.mlp_bias;
  json["model_type"] = family.model_type;
  json["num_attention_heads"] = spec.num_attention_heads;
  json["num_hidden_layers"] = spec.num_hidden_layers;
  json["num_key_value_heads"] = spec.num_key_value_heads;
  if (spec.pad_token_id) json["pad_token_id"] = *spec.pad_token_id;
  json["rms_norm_eps"] = spec.rms_norm_eps;
  json["rope_scaling"] = rope_scaling_json(spec.rope, "rope_type");
  json["rope_theta"] = spec.rope.theta;
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  if (spec.dtype) json["torch_dtype"] = to_string(*spec.dtype);
  json["use_cache"] = true;
  json["vocab_size"] = spec.vocab_size;
  if (family.write != nullptr) family.write(spec, json);
  if (!spec.tessera_tokenizer.empty()) json["tessera_tokenizer"] = spec.tessera_tokenizer;
  return json.dump(2) + "\n";
}

}  // namespace tessera::models
