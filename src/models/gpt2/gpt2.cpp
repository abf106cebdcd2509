// GPT-2: learned positions, LayerNorm with biases, one product for queries, keys and values, linear
// layers whose matrices stand [in, out] in files, a head that is the embedding.
//
// Its config.json has names of its own for what others have. Published folders hold the causal mask
// of each layer beside the weights, and some a prefix that the class of the whole model has. Next:
// gpt2_model.cpp.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "models/config_reader.h"
#include "models/family.h"
#include "models/keeps/kept_activations.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Absent means transformers' 0.1.
double dropout(ConfigReader& keys, std::string_view key) {
  return keys.number(key, {0.0, 1.0}).value_or(0.1);
}

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

void read_sizes(ConfigReader& keys, ModelSpec& spec) {
  const auto size = [&](std::string_view key, std::int64_t absent) {
    return keys.contains(key) ? required(keys, key, kSize) : absent;
  };
  spec.vocab_size = size("vocab_size", 50257);
  spec.hidden_size = size("n_embd", 768);
  spec.num_hidden_layers = keys.contains("n_layer") ? required(keys, "n_layer", kLayers) : 12;
  spec.num_attention_heads = size("n_head", 12);
  spec.num_key_value_heads = spec.num_attention_heads;
  spec.max_position_embeddings = size("n_positions", 1024);
  keys.expect("n_ctx", spec.max_position_embeddings, "n_positions says it");
  spec.intermediate_size = keys.integer("n_inner", kSize).value_or(4 * spec.hidden_size);
  TESSERA_CHECK(spec.hidden_size % spec.num_attention_heads == 0, ErrorKind::kConfig,
                "config.json n_embd: found ", spec.hidden_size,
                ", expected a multiple of n_head = ", spec.num_attention_heads);
  spec.head_dim = spec.hidden_size / spec.num_attention_heads;
  const auto hidden = static_cast<double>(spec.hidden_size);
  check_total(static_cast<double>(spec.num_hidden_layers) * hidden *
                  (4 * hidden + 2 * static_cast<double>(spec.intermediate_size)) +
              hidden * static_cast<double>(spec.vocab_size + spec.max_position_embeddings));
}

ModelSpec read_gpt2(ConfigReader& keys, Purpose /*purpose*/, LeftKeys& /*left*/) {
  ModelSpec spec;
  spec.family = Family::kGpt2;
  read_sizes(keys, spec);
  spec.rms_norm_eps = keys.number("layer_norm_epsilon", {1e-30, 1.0}).value_or(1e-5);
  spec.initializer_range = keys.number("initializer_range", {0.0, 1e3}).value_or(0.02);
  spec.tie_word_embeddings = keys.boolean("tie_word_embeddings").value_or(true);
  spec.attention_bias = true;
  spec.mlp_bias = true;
  spec.attention_dropout = dropout(keys, "attn_pdrop");
  spec.gpt2 = Gpt2Spec{.embd_pdrop = dropout(keys, "embd_pdrop"),
                       .resid_pdrop = dropout(keys, "resid_pdrop")};
  spec.dtype = read_dtype(keys);
  read_tokens(keys, spec);
  spec.tessera_tokenizer = read_tokenizer(keys);
  // gelu_new is GELU's tanh form under another name.
  if (keys.word("activation_function").value_or("gelu_new") != "gelu_pytorch_tanh") {
    keys.expect("activation_function", "gelu_new", "the activation of the MLP");
  }
  keys.expect("scale_attn_weights", true, "scores are divided by the root of the head's size");
  keys.expect("scale_attn_by_inverse_layer_idx", false, "scores are scaled alike in all layers");
  keys.expect("reorder_and_upcast_attn", false, "it is another order of roundings");
  // Of heads that sum a text up.
  keys.ignore({"summary_activation", "summary_first_dropout", "summary_proj_to_labels",
               "summary_type", "summary_use_proj"});
  return spec;
}

nlohmann::ordered_json gpt2_json(const ModelSpec& spec) {
  nlohmann::ordered_json json;
  json["activation_function"] = "gelu_new";
  json["architectures"] = {"GPT2LMHeadModel"};
  json["attn_pdrop"] = spec.attention_dropout;
  json["bos_token_id"] = or_null(spec.bos_token_id);
  json["embd_pdrop"] = spec.gpt2->embd_pdrop;
  json["eos_token_id"] = eos_token(spec.eos_token_ids);
  json["initializer_range"] = spec.initializer_range;
  json["layer_norm_epsilon"] = spec.rms_norm_eps;
  json["model_type"] = "gpt2";
  json["n_ctx"] = spec.max_position_embeddings;
  json["n_embd"] = spec.hidden_size;
  json["n_head"] = spec.num_attention_heads;
  json["n_inner"] = nullptr;
  if (spec.intermediate_size != 4 * spec.hidden_size) json["n_inner"] = spec.intermediate_size;
  json["n_layer"] = spec.num_hidden_layers;
  json["n_positions"] = spec.max_position_embeddings;
  if (spec.pad_token_id) json["pad_token_id"] = *spec.pad_token_id;
  json["resid_pdrop"] = spec.gpt2->resid_pdrop;
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  if (spec.dtype) json["torch_dtype"] = to_string(*spec.dtype);
  json["use_cache"] = true;
  json["vocab_size"] = spec.vocab_size;
  if (!spec.tessera_tokenizer.empty()) json["tessera_tokenizer"] = spec.tessera_tokenizer;
  return json;
}

/// As the language model has them: the published files are of the inner one.
std::string name_in_gpt2(std::string_view name) {
  constexpr std::string_view kPrefix = "transformer.";
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  const bool is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  return is_mask ? std::string() : std::string(name);
}

using nn::KeptValue;

/// What its forward keeps until backward (nn/keeps/layer_keeps.h).
class Gpt2Keeps : public TextKeeps {
 public:
  explicit Gpt2Keeps(ModelKeeps& of) : TextKeeps(of), layers_(of.layers()) {}

  Names names() const override { return {"wte", "h.", "ln_f"}; }
  KeptValue embedding(const std::string& name) override {
    const KeptValue tokens = layers_.embedding(name, nn::LayerKeeps::Ids::kOfBatch);
    return layers_.ledger().make(tokens.numel, tokens.dtype,
                                 tokens.wants || layers_.trains("wpe.weight"));
  }
  KeptValue layer(const KeptValue& x, std::int64_t number, const std::string& name) override;
  KeptValue norm(const KeptValue& x, const std::string& name) override;

 private:
  /// gpt2_layer.cpp: the matrix stands [in, out], and its product is never put off. Where ranks
  /// share the columns of a whole one, a copy of the own ones is kept.
  KeptValue linear(const KeptValue& x, const std::string& name, std::int64_t out_ranks = 1);
  KeptValue attention(const KeptValue& stream, const std::string& name);

  nn::LayerKeeps& layers_;
};

KeptValue Gpt2Keeps::norm(const KeptValue& x, const std::string& name) {
  const bool wants = x.wants || layers_.trains(name + ".weight") || layers_.trains(name + ".bias");
  const std::int64_t rows = x.numel / layers_.of().hidden;
  layers_.save_if(wants, x);
  layers_.save_if(wants, layers_.ledger().make(rows, DType::kFloat32));
  layers_.save_if(wants, layers_.ledger().make(rows, DType::kFloat32));
  return layers_.ledger().make(x.numel, x.dtype, wants);
}

KeptValue Gpt2Keeps::linear(const KeptValue& x, const std::string& name, std::int64_t out_ranks) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const GradContract& weight = layers_.parameter(name + ".weight");
  const auto shape = weight.local_shape();
  const DType compute = weight.compute.dtype;
  const KeptValue input = ledger.cast(x, compute);
  layers_.save_if(weight.trainable, input);
  const std::int64_t out = shape[1] / out_ranks;
  const bool wants = x.wants || weight.trainable || layers_.trains(name + ".bias");
  layers_.save_if(wants && out_ranks > 1, ledger.make(shape[0] * out, compute));
  const KeptValue product = ledger.make(x.numel / shape[0] * out, compute, wants);
  ledger.product(product);
  return ledger.cast(product, x.dtype);
}

KeptValue Gpt2Keeps::attention(const KeptValue& stream, const std::string& name) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const std::int64_t heads =
      model().of().spec.num_attention_heads / static_cast<std::int64_t>(layers_.of().tp);
  const KeptValue all = linear(layers_.enter(stream), name + "c_attn", layers_.of().tp);
  const auto part = [&] { return ledger.make(all.numel / 3, all.dtype, all.wants); };
  const KeptValue q = part(), k = part(), v = part();
  return layers_.leave(linear(layers_.causal_attention(q, k, v, heads, heads), name + "c_proj"));
}

KeptValue Gpt2Keeps::layer(const KeptValue& x, std::int64_t /*number*/, const std::string& name) {
  layers_.ledger().begin_layer({x});
  const KeptValue middle = layers_.sum(x, attention(norm(x, name + "ln_1"), name + "attn."));
  const KeptValue opened = linear(layers_.enter(norm(middle, name + "ln_2")), name + "mlp.c_fc");
  layers_.save_if(opened.wants, opened);
  const KeptValue fed = linear(layers_.made_like(opened), name + "mlp.c_proj");
  const KeptValue result = layers_.sum(middle, layers_.leave(fed));
  layers_.ledger().end_layer(result);
  return result;
}

std::unique_ptr<TextKeeps> keeps_of_gpt2(ModelKeeps& model) {
  return std::make_unique<Gpt2Keeps>(model);
}

}  // namespace

const FamilyTraits& gpt2_traits() {
  static const FamilyTraits traits{
      .family = Family::kGpt2,
      .model_type = "gpt2",
      .architecture = "GPT2LMHeadModel",
      // read_all knows the defaults.
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 1024,
      .has_mlp_bias = false,
      .pins = {},
      .frozen = {},
      .module_name = name_in_gpt2,
      .keeps = keeps_of_gpt2,
      .read_all = read_gpt2,
      .write_all = gpt2_json,
      .learned_positions = true,
      .transposed_linears = true,
      .not_dropped = not_dropped,
  };
  return traits;
}

}  // namespace tessera::models
