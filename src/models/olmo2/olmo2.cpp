// OLMo 2: norms behind attention and MLP instead of before them, and queries and keys normed over
// all their heads together.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_olmo2(ConfigReader& keys, ModelSpec& spec) {
  if (!keys.contains("rms_norm_eps")) spec.rms_norm_eps = 1e-5;
  if (!keys.contains("pad_token_id") && spec.vocab_size > 1) spec.pad_token_id = 1;
}

void write_olmo2(const ModelSpec& spec, nlohmann::ordered_json& json) {
  json["pad_token_id"] = or_null(spec.pad_token_id);  // an absent one is not null
}

}  // namespace

const FamilyTraits& olmo2_traits() {
  static const FamilyTraits traits{
      .family = Family::kOlmo2,
      .model_type = "olmo2",
      .architecture = "Olmo2ForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 2048,
      .has_mlp_bias = false,
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .norm_rounds_once = true,
      .read = read_olmo2,
      .write = write_olmo2,
      .norms = NormPlacement::kAfter,
      .qk_norm_over_heads = true,
  };
  return traits;
}

}  // namespace tessera::models
