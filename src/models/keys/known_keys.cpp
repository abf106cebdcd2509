#include "models/keys/known_keys.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/text/wildcard.h"
#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

constexpr std::string_view kDecoderOnly = "decoder-only models";

/// Keys that transformers writes about files, generation or the caller's choices; not logged.
constexpr std::string_view kOfEveryConfig[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "_name_or_path",
    "architectures",  // of a nested config
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",  // read only where use_sliding_window is true, as sliding_window
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "sliding_window",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
};

/// Keys that other tools and older versions of transformers write; `*` matches any characters.
constexpr std::string_view kInert[] = {
    // Where the file comes from, and who made it.
    "_commit_hash",
    "_from_model_config",
    "_num_labels",
    "base_model_name_or_path",
    "is_llama_config",
    "language",
    "library_name",
    "license",
    "model_name",
    "name_or_path",
    "pipeline_tag",
    "tags",
    "transformers.js_config",
    "transformers_weights",
    "unsloth_*",
    // Settings of runs.
    "_flash_attn_2_enabled",
    "base_model_ep_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "cache_config",
    "cache_implementation",
    "device_map",
    "experts_implementation",
    "flash_attention",
    "gradient_checkpointing",
    "keys_to_ignore_at_inference",
    "low_cpu_mem_usage",
    "onnx_*",
    "trust_remote_code",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_gradient_checkpointing",
    "use_return_dict",
    "xla_device",
    // Generation and tokenizers.
    "assistant_*",
    "chat_template",
    "cls_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "forced_decoder_ids",
    "generation_config",
    "guidance_scale",
    "mask_token_id",
    "max_new_tokens",
    "min_new_tokens",
    "min_p",
    "output_logits",
    "output_past",
    "penalty_alpha",
    "predict_special_tokens",
    "renormalize_logits",
    "stop_strings",
    "tokenizer_name",
    "tokenizer_padding_side",
    "tokenizer_type",
    "unk_token_id",
    // Lengths that no table of this model depends on.
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    // Heads that summarize a text.
    "classifier_activation",
    "classifier_bias",
    "classifier_dropout",
};

/// Keys that only some kinds of rope read. mscale_all_dim is not among them: transformers reads it
/// for every kind.
constexpr std::string_view kOfRopeKinds[] = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",  // of no kind, written together with yarn
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "original_max_position_embeddings",
    "short_factor",
    "truncate",
};

/// Keys by which false, or nothing, would take away what a decoder has.
constexpr std::string_view kOnByDefault[] = {
    "*qk_layernorm", "*qk_norm",       "*qkv_bias",          "bias",     "causal",   "is_causal",
    "no_bias",       "norm_topk_prob", "scale_attn_weights", "use_bias", "use_rope",
};

struct KnownValue {
  std::string_view key;  ///< `*` matches any characters in those that mean "off"
  nlohmann::json value;
  std::string_view why = {};  ///< of those that matter: what another value would mean
};

/// Keys of computations that no family has: any other value is refused, also with
/// allow_unknown_config_keys.
const std::vector<KnownValue>& mattering() {
  static const std::vector<KnownValue> table{
      {"use_sliding_window", false, "sliding windows are not supported in this family"},
      {"quantization_config", nullptr, "quantized weights are not supported"},
      {"pretraining_tp", 1, "sliced products are not supported"},
      {"partial_rotary_factor", 1.0, kFullRotary},
      {"is_encoder_decoder", false, kDecoderOnly},
      {"is_decoder", false, "no cross attention"},
      {"add_cross_attention", false, "no cross attention"},
      {"cross_attention_hidden_size", nullptr, "no cross attention"},
      {"tie_encoder_decoder", false, kDecoderOnly},
      {"chunk_size_feed_forward", 0, "the MLP runs in one piece"},
      {"pruned_heads", nlohmann::json::object(), "all heads are there"},
      {"rope_interleaved", false, "rope pairs x[i] with x[i + head_dim / 2]"},
  };
  return table;
}

// Values at which keys of other families mean nothing. At another value the key stays unknown.

const std::vector<KnownValue>& off_in_layers() {
  static const std::vector<KnownValue> table{
      // Shared experts, experts at all, and their routers.
      {"shared_expert_intermediate_size", 0},
      {"shared_intermediate_size", 0},
      {"moe_shared_expert_intermediate_size", 0},
      {"n_shared_experts", 0},
      {"num_shared_experts", 0},
      {"num_experts", 0},
      {"num_local_experts", 0},
      {"n_routed_experts", 0},
      {"num_experts_per_tok", 0},
      {"moe_intermediate_size", 0},
      {"moe_layer_freq", 1},
      {"n_group", 1},
      {"topk_group", 1},
      {"routed_scaling_factor", 1.0},
      {"router_jitter_noise", 0.0},
      {"router_z_loss_coef", 0.0},
      {"router_aux_loss_coef", 0.0},
      // Layers after the model's own, and layers that share the results of others.
      {"num_nextn_predict_layers", 0},
      {"*mtp*layers", 0},
      {"*mtp*modules", 0},
      {"num_kv_shared_layers", 0},
      {"hidden_size_per_layer_input", 0},
      // Attention.
      {"causal", true},
      {"is_causal", true},
  };
  return table;
}

const std::vector<KnownValue>& off_in_numbers() {
  static const std::vector<KnownValue> table{
      // Scales and caps.
      {"embedding_multiplier", 1.0},
      {"lm_head_multiplier", 1.0},
      {"logits_scaling", 1.0},
      {"residual_multiplier", 1.0},
      {"scale_emb", 1.0},
      // Dropout, and the loss.
      {"*dropout*", 0.0},
      {"*_pdrop", 0.0},
      {"layerdrop", 0.0},
      {"loss_type", "ForCausalLM"},
      {"loss_type", "ForCausalLMLoss"},
  };
  return table;
}

bool has_biases(const ModelSpec& spec) {
  return spec.attention_bias || spec.mlp_bias ||
         (spec.moe && (spec.moe->expert_bias || spec.moe->router_bias));
}

bool has_qk_norm(const ModelSpec& spec) {
  if (spec.chunked) return spec.chunked->use_qk_norm;
  const FamilyTraits& family = traits(spec.family);
  return spec.use_qk_norm.value_or(family.qk_norm || family.qk_norm_over_heads);
}

/// Keys that repeat what the decoder with these numbers has anyway.
std::vector<KnownValue> repeated(const ModelSpec& spec) {
  std::vector<KnownValue> values{{"position_embedding_type", "rope"},
                                 {"position_embedding_type", "rotary"},
                                 {"rotary_pct", 1.0},
                                 {"rope_ratio", 1.0},
                                 {"use_rope", true}};
  const bool norm = has_qk_norm(spec);
  for (const std::string_view key : {"use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"})
    values.push_back({key, norm,
                      norm ? "it matters: queries and keys have norms in this model"
                           : "it matters: queries and keys have no norms in this model"});
  const bool bias = spec.attention_bias;
  for (const std::string_view key : {"qkv_bias", "use_qkv_bias", "attention_qkv_bias"})
    values.push_back({key, bias,
                      bias ? "it matters: queries, keys and values have biases in this model"
                           : "it matters: queries, keys and values have no biases in this model"});
  if (!has_biases(spec)) {
    for (const std::string_view key : {"bias", "use_bias"}) values.push_back({key, false});
    values.push_back({"no_bias", true});
  }
  return values;
}

bool has(const std::vector<KnownValue>& table, std::string_view key, const nlohmann::json& value) {
  return std::ranges::any_of(table, [&](const KnownValue& each) {
    return wildcard_match(each.key, key) && (value.is_null() || value == each.value);
  });
}

template <std::size_t kCount>
bool matches(const std::string_view (&patterns)[kCount], std::string_view key) {
  return std::ranges::any_of(
      patterns, [&](std::string_view pattern) { return wildcard_match(pattern, key); });
}

bool is_off(std::string_view key, const nlohmann::json& value) {
  const bool says_off =
      value == false || ((value.is_array() || value.is_object()) && value.empty());
  return value.is_null() || (says_off && !matches(kOnByDefault, key)) ||
         has(off_in_layers(), key, value) || has(off_in_numbers(), key, value);
}

/// The keys that `changes_nothing` holds for go to the ignored ones, the rest to the unknown ones.
template <class ChangesNothing>
void sort_left(ConfigReader& keys, LeftKeys& left, const ChangesNothing& changes_nothing) {
  for (const std::string& key : keys.untaken()) {
    if (!changes_nothing(key, *keys.find(key))) continue;
    keys.ignore({key});
    left.ignored.push_back(concat(keys.path(), shown(key)));
  }
  std::ranges::move(keys.unknown(), std::back_inserter(left.unknown));
}

}  // namespace

void settle_left_keys(ConfigReader& keys, const ModelSpec* spec, LeftKeys& left) {
  for (const std::string_view key : kOfEveryConfig) keys.ignore({key});
  const auto untaken = keys.untaken();
  for (const auto& [key, value, why] : mattering()) {
    if (std::ranges::count(untaken, key) > 0) keys.expect(key, value, why);
  }
  const auto same = spec == nullptr ? std::vector<KnownValue>() : repeated(*spec);
  for (const auto& [key, value, why] : same) {
    const nlohmann::json* found = std::ranges::count(untaken, key) > 0 ? keys.find(key) : nullptr;
    if (why.empty() || found == nullptr || found->is_null() || *found == value) continue;
    keys.refuse(key, concat(shown(value), " (", why, ")"));
  }
  sort_left(keys, left, [&](const std::string& key, const nlohmann::json& value) {
    return matches(kInert, key) || is_off(key, value) || has(same, key, value);
  });
}

void settle_left_rope_keys(ConfigReader& keys, LeftKeys& left) {
  // Which pairs turn by which of the positions that images tell apart: those of text are equal.
  keys.ignore({"mrope_interleaved", "mrope_section"});
  sort_left(keys, left, [](const std::string& key, const nlohmann::json& value) {
    return matches(kOfRopeKinds, key) || is_off(key, value);
  });
}

}  // namespace tessera::models
