#include "models/deepseek_v2/deepseek_keys.h"

#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr IntRange kRoutedExperts{1, 65536};

std::int64_t given_or_needed(ConfigReader& keys, std::string_view key, IntRange range,
                             std::optional<std::int64_t> absent) {
  if (absent && !keys.contains(key)) return *absent;
  return required(keys, key, range);
}

}  // namespace

void read_latent_attention(ConfigReader& keys, ModelSpec& spec) {
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

void write_latent_attention(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const MlaSpec& mla = *spec.mla;
  json.erase("head_dim");
  json["kv_lora_rank"] = mla.kv_lora_rank;
  json["q_lora_rank"] = or_null(mla.q_lora_rank);
  json["qk_nope_head_dim"] = mla.qk_nope_head_dim;
  json["qk_rope_head_dim"] = mla.qk_rope_head_dim;
  json["rope_scaling"] = rope_scaling_json(spec.rope, "type");
  json["v_head_dim"] = mla.v_head_dim;
}

void read_routed_experts(ConfigReader& keys, ModelSpec& spec, const RoutedExpertDefaults& absent) {
  MoeSpec& moe = spec.moe.emplace();
  moe.num_experts = given_or_needed(keys, "n_routed_experts", kRoutedExperts, absent.experts);
  moe.experts_per_token =
      given_or_needed(keys, "num_experts_per_tok", {1, moe.num_experts}, absent.experts_per_token);
  moe.moe_intermediate_size = keys.integer("moe_intermediate_size", kSize).value_or(absent.inner);
  const auto shared = keys.integer("n_shared_experts", kRoutedExperts).value_or(absent.shared);
  moe.shared_intermediate_size = shared * moe.moe_intermediate_size;
  moe.first_dense_layers =
      keys.integer("first_k_dense_replace", {0, kLayers.max}).value_or(absent.first_dense);
  moe.router_dtype = RouterDtype::kFloat32;
  moe.routed_scaling_factor =
      keys.number("routed_scaling_factor", {1e-6, 1e6}).value_or(absent.scaling);
  keys.expect("moe_layer_freq", 1, "every layer after the first dense ones has experts");
  // transformers computes no auxiliary loss for these families, and has no other use for these.
  keys.ignore({"aux_loss_alpha", "seq_aux", "output_router_logits", "ep_size"});
}

void write_routed_experts(const MoeSpec& moe, nlohmann::ordered_json& json) {
  json["first_k_dense_replace"] = moe.first_dense_layers;
  json["moe_intermediate_size"] = moe.moe_intermediate_size;
  json["n_group"] = moe.n_group;
  json["n_routed_experts"] = moe.num_experts;
  json["n_shared_experts"] = moe.shared_intermediate_size / moe.moe_intermediate_size;
  json["norm_topk_prob"] = moe.norm_topk_prob;
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["routed_scaling_factor"] = moe.routed_scaling_factor;
  json["topk_group"] = moe.topk_group;
}

ExpertGroups read_expert_groups(ConfigReader& keys) {
  return {keys.integer("n_group", kRoutedExperts), keys.integer("topk_group", kRoutedExperts)};
}

void set_expert_groups(ConfigReader& keys, const ExpertGroups& found, MoeSpec& moe) {
  const auto& [groups, kept] = found;
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

void read_sigmoid_router(ConfigReader& keys, const ExpertGroups& absent, MoeSpec& moe) {
  moe.scores = ExpertScores::kSigmoid;
  moe.norm_topk_prob = keys.boolean("norm_topk_prob").value_or(true);
  ExpertGroups found = read_expert_groups(keys);
  if (!found.groups) found.groups = absent.groups;
  if (!found.kept) found.kept = absent.kept;
  set_expert_groups(keys, found, moe);
  keys.expect("scoring_func", "sigmoid", "the scores of this family");
  keys.expect("topk_method", "noaux_tc", "how this family chooses experts");
}

std::int64_t read_prediction_layers(ConfigReader& keys) {
  // The hub's key, and transformers' other name of it.
  const auto published = keys.integer("num_nextn_predict_layers", {0, kLayers.max});
  const auto renamed = keys.integer("num_mtp_layers", {0, kLayers.max});
  if (published && renamed && *published != *renamed) {
    keys.refuse("num_mtp_layers",
                concat("num_nextn_predict_layers = ", *published, ", or one key"));
  }
  return published.value_or(renamed.value_or(0));
}

}  // namespace tessera::models
