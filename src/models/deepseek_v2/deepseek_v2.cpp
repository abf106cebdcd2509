// DeepSeek V2, the lite one and the full one: latent attention, a first dense layer, shared
// experts, softmax routing without a sum to divide by, from all experts or from the best groups of
// them.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kGreedy = "greedy";
constexpr const char* kGroupLimited = "group_limited_greedy";
constexpr IntRange kRoutedExperts{1, 65536};

void read_attention(ConfigReader& keys, ModelSpec& spec) {
  MlaSpec& mla = spec.mla.emplace();
  mla.kv_lora_rank = keys.integer("kv_lora_rank", kSize).value_or(512);
  mla.qk_nope_head_dim = keys.integer("qk_nope_head_dim", kSize).value_or(128);
  mla.qk_rope_head_dim = keys.integer("qk_rope_head_dim", kSize).value_or(64);
  mla.v_head_dim = keys.integer("v_head_dim", kSize).value_or(128);
  // An absent key means transformers' default, an explicit null that there is no latent.
  if (!keys.contains("q_lora_rank")) mla.q_lora_rank = 1536;
  if (const auto rank = keys.integer("q_lora_rank", kSize)) mla.q_lora_rank = rank;
  check_head_dim("qk_rope_head_dim", mla.qk_rope_head_dim);
  if (spec.num_key_value_heads != spec.num_attention_heads) {
    keys.refuse("num_key_value_heads", concat("num_attention_heads = ", spec.num_attention_heads,
                                              ", as every head has keys of its own"));
  }
  // As transformers writes them; both follow from the others.
  if (keys.contains("head_dim") && spec.head_dim != mla.qk_rope_head_dim) {
    keys.refuse("head_dim", concat("qk_rope_head_dim = ", mla.qk_rope_head_dim));
  }
  spec.head_dim = mla.qk_rope_head_dim;
  keys.expect("qk_head_dim", mla.qk_head_dim(), "it is qk_nope_head_dim + qk_rope_head_dim");
}

void read_groups(ConfigReader& keys, MoeSpec& moe) {
  const std::string method = keys.word("topk_method").value_or(kGreedy);
  const auto groups = keys.integer("n_group", kRoutedExperts);
  const auto kept = keys.integer("topk_group", kRoutedExperts);
  if (method == kGreedy) return;  // then the two mean nothing
  if (method != kGroupLimited) {
    keys.refuse("topk_method", concat("\"", kGreedy, "\" or \"", kGroupLimited, "\""));
  }
  if (!groups || moe.num_experts % *groups != 0) {
    keys.refuse("n_group", concat("a divisor of n_routed_experts = ", moe.num_experts));
  }
  if (!kept || *kept > *groups) {
    keys.refuse("topk_group", concat("an integer from 1 to n_group = ", *groups));
  }
  if (*kept * (moe.num_experts / *groups) < moe.experts_per_token) {
    keys.refuse("topk_group", concat("enough groups of ", moe.num_experts / *groups,
                                     " experts for num_experts_per_tok = ", moe.experts_per_token));
  }
  moe.n_group = *groups;
  moe.topk_group = *kept;
}

void read_routed_experts(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = spec.moe.emplace();
  moe.num_experts = required(keys, "n_routed_experts", kRoutedExperts);
  moe.experts_per_token = required(keys, "num_experts_per_tok", {1, moe.num_experts});
  moe.moe_intermediate_size = keys.integer("moe_intermediate_size", kSize).value_or(1407);
  const std::int64_t shared = keys.integer("n_shared_experts", kRoutedExperts).value_or(2);
  moe.shared_intermediate_size = shared * moe.moe_intermediate_size;
  moe.first_dense_layers = keys.integer("first_k_dense_replace", {0, kLayers.max}).value_or(0);
  moe.router_dtype = RouterDtype::kFloat32;
  moe.routed_scaling_factor = keys.number("routed_scaling_factor", {1e-6, 1e6}).value_or(1.0);
  read_groups(keys, moe);
  keys.expect("scoring_func", "softmax", "the scores of deepseek_v2");
  keys.expect("moe_layer_freq", 1, "every layer after the first dense ones has experts");
  keys.expect("norm_topk_prob", false,
              "transformers never divides by the sum, the published code would");
  // transformers computes no auxiliary loss for this family, and has no other use for these.
  keys.ignore({"aux_loss_alpha", "seq_aux", "output_router_logits", "ep_size"});
}

void read_deepseek_v2(ConfigReader& keys, ModelSpec& spec) {
  read_attention(keys, spec);
  read_routed_experts(keys, spec);
}

void write_deepseek_v2(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const MlaSpec& mla = *spec.mla;
  const MoeSpec& moe = *spec.moe;
  json.erase("head_dim");
  json["first_k_dense_replace"] = moe.first_dense_layers;
  json["kv_lora_rank"] = mla.kv_lora_rank;
  json["moe_intermediate_size"] = moe.moe_intermediate_size;
  json["moe_layer_freq"] = 1;
  json["n_group"] = moe.n_group;
  json["n_routed_experts"] = moe.num_experts;
  json["n_shared_experts"] = moe.shared_intermediate_size / moe.moe_intermediate_size;
  json["norm_topk_prob"] = false;
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["q_lora_rank"] = nullptr;
  if (mla.q_lora_rank) json["q_lora_rank"] = *mla.q_lora_rank;
  json["qk_nope_head_dim"] = mla.qk_nope_head_dim;
  json["qk_rope_head_dim"] = mla.qk_rope_head_dim;
  json["rope_scaling"] = rope_scaling_json(spec.rope, "type");
  json["routed_scaling_factor"] = moe.routed_scaling_factor;
  json["scoring_func"] = "softmax";
  json["topk_group"] = moe.topk_group;
  json["topk_method"] = moe.n_group > 1 ? kGroupLimited : kGreedy;
  json["v_head_dim"] = mla.v_head_dim;
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
