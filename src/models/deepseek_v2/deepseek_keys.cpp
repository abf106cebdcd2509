#include "models/deepseek_v2/deepseek_keys.h"

#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr IntRange kRoutedExperts{1, 65536};

void read_shared_experts(ConfigReader& keys, ModelSpec& spec) {
  const MoeSpec& absent = *traits(spec.family).spec.moe;
  const std::int64_t shared =
      keys.integer("n_shared_experts", kRoutedExperts)
          .value_or(absent.shared_intermediate_size / absent.moe_intermediate_size);
  spec.moe->shared_intermediate_size = shared * spec.moe->moe_intermediate_size;
}

void read_experts_per_token(ConfigReader& keys, ModelSpec& spec) {
  size("num_experts_per_tok", &MoeSpec::experts_per_token, {1, spec.moe->num_experts})
      .read(keys, spec);
}

}  // namespace

KeyRows latent_attention_rows() {
  return {
      {"head_dim", row("head_dim", &ModelSpec::head_dim).read},
      row("kv_lora_rank", &MlaSpec::kv_lora_rank),
      row("q_lora_rank", &MlaSpec::q_lora_rank),  // null: there is no such latent
      row("qk_nope_head_dim", &MlaSpec::qk_nope_head_dim),
      row("qk_rope_head_dim", &MlaSpec::qk_rope_head_dim),
      written({"rope_scaling"},
              [](const ModelSpec& spec) { return rope_scaling_json(spec.rope, "type"); }),
      row("v_head_dim", &MlaSpec::v_head_dim),
  };
}

void settle_latent_attention(ConfigReader& keys, ModelSpec& spec) {
  const MlaSpec& mla = *spec.mla;
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

KeyRows routed_expert_rows() {
  return {
      row("first_k_dense_replace", &MoeSpec::first_dense_layers, {0, kLayers.max}),
      row("moe_intermediate_size", &MoeSpec::moe_intermediate_size),
      row("n_group", &MoeSpec::n_group, kRoutedExperts),
      size("n_routed_experts", &MoeSpec::num_experts, kRoutedExperts),
      written({"n_shared_experts", read_shared_experts},
              [](const ModelSpec& spec) {
                return spec.moe->shared_intermediate_size / spec.moe->moe_intermediate_size;
              }),
      row("norm_topk_prob", &MoeSpec::norm_topk_prob),
      written({"num_experts_per_tok", read_experts_per_token},
              [](const ModelSpec& spec) { return spec.moe->experts_per_token; }),
      row("routed_scaling_factor", &MoeSpec::routed_scaling_factor, {1e-6, 1e6}),
      row("topk_group", &MoeSpec::topk_group, kRoutedExperts),
      // transformers computes no auxiliary loss for these families, and has no other use for these.
      ignored({"aux_loss_alpha", "seq_aux", "output_router_logits", "ep_size"}),
  };
}

void check_routed_experts(ConfigReader& keys, const ModelSpec& spec) {
  const MoeSpec& moe = *spec.moe;
  if (moe.n_group == 0 || moe.num_experts % moe.n_group != 0) {
    keys.refuse("n_group", concat("a divisor of n_routed_experts = ", moe.num_experts));
  }
  if (moe.topk_group == 0 || moe.topk_group > moe.n_group) {
    keys.refuse("topk_group", concat("an integer from 1 to n_group = ", moe.n_group));
  }
  const std::int64_t each = moe.num_experts / moe.n_group;
  if (moe.topk_group * each < moe.experts_per_token) {
    keys.refuse("topk_group", concat("enough groups of ", each,
                                     " experts for num_experts_per_tok = ", moe.experts_per_token));
  }
}

KeepInFloat32 sigmoid_router_pins() {
  return {.strict = {"e_score_correction_bias"}, .under_float16 = {}, .strict_of_routers = true};
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
