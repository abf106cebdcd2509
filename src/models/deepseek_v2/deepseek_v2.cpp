// DeepSeek V2, the lite one and the full one: latent attention, a first dense layer, shared
// experts, softmax routing without a sum to divide by, from all experts or from the best groups of
// them.
#include <nlohmann/json.hpp>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kGreedy = "greedy";
constexpr const char* kGroupLimited = "group_limited_greedy";

void read_groups(ConfigReader& keys, MoeSpec& moe) {
  const std::string method = keys.word("topk_method").value_or(kGreedy);
  const ExpertGroups groups = read_expert_groups(keys);
  if (method == kGreedy) return;  // then the two mean nothing
  if (method != kGroupLimited) {
    keys.refuse("topk_method", concat("\"", kGreedy, "\" or \"", kGroupLimited, "\""));
  }
  set_expert_groups(keys, groups, moe);
}

void read_deepseek_v2(ConfigReader& keys, ModelSpec& spec) {
  read_latent_attention(keys, spec);
  read_routed_experts(keys, spec, {.inner = 1407, .shared = 2});
  read_groups(keys, *spec.moe);
  keys.expect("scoring_func", "softmax", "the scores of deepseek_v2");
  keys.expect("norm_topk_prob", false,
              "transformers never divides by the sum, the published code would");
}

void write_deepseek_v2(const ModelSpec& spec, nlohmann::ordered_json& json) {
  write_latent_attention(spec, json);
  write_routed_experts(*spec.moe, json);
  json["moe_layer_freq"] = 1;
  json["scoring_func"] = "softmax";
  json["topk_method"] = spec.moe->n_group > 1 ? kGroupLimited : kGreedy;
}

}  // namespace

const FamilyTraits& deepseek_v2_traits() {
  static const FamilyTraits traits{
      .family = Family::kDeepseekV2,
      .model_type = "deepseek_v2",
      .architecture = "DeepseekV2ForCausalLM",
      .default_head_dim = 64,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 2048,
      .has_mlp_bias = false,
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .router_module = "gate",
      .read = read_deepseek_v2,
      .write = write_deepseek_v2,
  };
  return traits;
}

}  // namespace tessera::models
