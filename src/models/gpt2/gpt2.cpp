// GPT-2: learned positions, LayerNorm with biases, one product for queries, keys and values, linear
// layers whose matrices stand [in, out] in files, a head that is the embedding.
//
// Its config.json has its own names for common values. Published folders also hold the causal mask
// of each layer, and some a prefix that the class of the whole model has. Next: gpt2_model.cpp.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "models/family.h"
#include "models/keys/config_reader.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Not refused: every published folder of this family says 0.1, or nothing.
std::string not_dropped(const ModelSpec& spec) {
  std::string found;
  const auto add = [&](std::string_view key, double value) {
    if (value != 0.0) found += concat(found.empty() ? "" : ", ", key, " = ", value);
  };
  add("attn_pdrop", spec.attention_dropout);
  add("embd_pdrop", spec.gpt2->embd_pdrop);
  add("resid_pdrop", spec.gpt2->resid_pdrop);
  return found;
}

void settle_sizes(ConfigReader& keys, ModelSpec& spec) {
  spec.num_key_value_heads = spec.num_attention_heads;
  keys.expect("n_ctx", spec.max_position_embeddings, "n_positions says it");
  if (spec.intermediate_size == 0) spec.intermediate_size = 4 * spec.hidden_size;
  TESSERA_CHECK(spec.hidden_size % spec.num_attention_heads == 0, ErrorKind::kConfig,
                "config.json n_embd: found ", spec.hidden_size,
                ", expected a multiple of n_head = ", spec.num_attention_heads);
  spec.head_dim = spec.hidden_size / spec.num_attention_heads;
  const auto hidden = static_cast<double>(spec.hidden_size);
  check_total(static_cast<double>(spec.num_hidden_layers) * hidden *
                  (4 * hidden + 2 * static_cast<double>(spec.intermediate_size)) +
              hidden * static_cast<double>(spec.vocab_size + spec.max_position_embeddings));
}

void read_gpt2(ConfigReader& keys, Purpose /*purpose*/, ModelSpec& spec, LeftKeys& /*left*/) {
  settle_sizes(keys, spec);
  spec.dtype = read_dtype(keys);
  read_tokens(keys, spec);
  spec.tessera_tokenizer = read_tokenizer(keys);
}

void read_activation_function(ConfigReader& keys, ModelSpec& /*spec*/) {
  // gelu_new is GELU's tanh form under another name.
  if (keys.word("activation_function").value_or("gelu_new") == "gelu_pytorch_tanh") return;
  keys.expect("activation_function", "gelu_new", "the activation of the MLP");
}

Json inner_size(const ModelSpec& spec) {
  const bool is_default = spec.intermediate_size == 4 * spec.hidden_size;
  return is_default ? Json() : Json(spec.intermediate_size);
}

KeyRows rows_of_gpt2() {
  constexpr NumberRange kShare{0.0, 1.0};
  return {
      written({"activation_function", read_activation_function},
              [](const ModelSpec&) { return "gelu_new"; }),
      said("architectures", {"GPT2LMHeadModel"}),
      row("attn_pdrop", &ModelSpec::attention_dropout, kShare),
      written("bos_token_id", &ModelSpec::bos_token_id),
      row("embd_pdrop", &Gpt2Spec::embd_pdrop, kShare),
      eos_row(),
      row("initializer_range", &ModelSpec::initializer_range, {0.0, 1e3}),
      row("layer_norm_epsilon", &ModelSpec::rms_norm_eps, kEps),
      said("model_type", "gpt2"),
      written("n_ctx", &ModelSpec::max_position_embeddings),
      size("n_embd", &ModelSpec::hidden_size),
      size("n_head", &ModelSpec::num_attention_heads),
      written(row("n_inner", &ModelSpec::intermediate_size), inner_size),
      size("n_layer", &ModelSpec::num_hidden_layers, kLayers),
      size("n_positions", &ModelSpec::max_position_embeddings),
      pad_row(),
      row("resid_pdrop", &Gpt2Spec::resid_pdrop, kShare),
      row("tie_word_embeddings", &ModelSpec::tie_word_embeddings),
      dtype_row("torch_dtype"),
      said("use_cache", true),
      size("vocab_size", &ModelSpec::vocab_size),
      only("scale_attn_weights", true, "scores are divided by the root of the head's size"),
      only("scale_attn_by_inverse_layer_idx", false, "scores are scaled alike in all layers"),
      only("reorder_and_upcast_attn", false, "it is another order of roundings"),
      // Keys of heads that sum a text up.
      ignored({"summary_activation", "summary_first_dropout", "summary_proj_to_labels",
               "summary_type", "summary_use_proj"}),
  };
}

/// As the language model has them: the published files are of the inner one.
std::string name_in_gpt2(std::string_view name) {
  constexpr std::string_view kPrefix = "transformer.";
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  const bool is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  return is_mask ? std::string() : std::string(name);
}

}  // namespace

const FamilyTraits& gpt2_traits() {
  static const FamilyTraits traits{
      .model_type = "gpt2",
      .architecture = "GPT2LMHeadModel",
      .spec = {.family = Family::kGpt2,
               .vocab_size = 50257,
               .hidden_size = 768,
               .num_hidden_layers = 12,
               .num_attention_heads = 12,
               .max_position_embeddings = 1024,
               .rms_norm_eps = 1e-5,
               .tie_word_embeddings = true,
               .attention_bias = true,
               .mlp_bias = true,
               .attention_dropout = 0.1,
               .gpt2 = Gpt2Spec{}},
      .rows = rows_of_gpt2(),
      .read_all = read_gpt2,
      .module_name = name_in_gpt2,
      .learned_positions = true,
      .transposed_linears = true,
      .not_dropped = not_dropped,
  };
  return traits;
}

}  // namespace tessera::models
