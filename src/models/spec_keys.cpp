#include "models/spec_keys.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::models {

void ignore_harmless(ConfigReader& keys) {
  keys.ignore({"_name_or_path",
               "transformers_version",
               "use_cache",
               "auto_map",
               "torchscript",
               "attn_implementation",
               "_attn_implementation",
               "_attn_implementation_autoset",
               "output_attentions",
               "output_hidden_states",
               "return_dict",
               "return_dict_in_generate",
               "output_scores",
               "use_bfloat16",
               "tf_legacy_loss",
               "id2label",
               "label2id",
               "num_labels",
               "problem_type",
               "task_specific_params",
               "finetuning_task",
               "prefix",
               "tokenizer_class",
               "decoder_start_token_id",
               "forced_bos_token_id",
               "forced_eos_token_id",
               "sep_token_id",
               "max_length",
               "min_length",
               "do_sample",
               "early_stopping",
               "num_beams",
               "num_beam_groups",
               "diversity_penalty",
               "temperature",
               "top_k",
               "top_p",
               "typical_p",
               "repetition_penalty",
               "length_penalty",
               "no_repeat_ngram_size",
               "encoder_no_repeat_ngram_size",
               "bad_words_ids",
               "num_return_sequences",
               "remove_invalid_values",
               "exponential_decay_length_penalty",
               "suppress_tokens",
               "begin_suppress_tokens"});
}

std::int64_t required(ConfigReader& keys, std::string_view key, IntRange range) {
  const auto value = keys.integer(key, range);
  if (!value) keys.refuse(key, concat("an integer from ", range.min, " to ", range.max));
  return *value;
}

std::optional<DType> read_dtype(ConfigReader& keys) {
  std::optional<DType> result;
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    auto word = keys.word(key);
    if (!word) continue;
    if (word->starts_with("torch.")) word->erase(0, 6);
    const auto dtype = parse_dtype(*word);
    if (!dtype || !is_floating(*dtype)) keys.refuse(key, "float32, bfloat16, float16 or float64");
    if (result && *result != *dtype) keys.refuse(key, "the same as dtype");
    result = dtype;
  }
  return result;
}

void read_layer_types(ConfigReader& keys, ModelSpec& spec) {
  const nlohmann::json* types = keys.take("layer_types");
  if (types == nullptr) return;
  const std::string expected = concat("a list of ", spec.num_hidden_layers, " times \"",
                                      kSlidingAttention, "\" or \"", kFullAttention, "\"");
  if (!types->is_array() || std::cmp_not_equal(types->size(), spec.num_hidden_layers)) {
    keys.refuse("layer_types", expected);
  }
  for (std::size_t i = 0; i < types->size(); ++i) {
    const nlohmann::json& type = (*types)[i];
    TESSERA_CHECK(type == kSlidingAttention || type == kFullAttention, ErrorKind::kConfig,
                  "config.json layer_types: found ", shown(type), ", expected ", expected);
    spec.layer_types[i] = type == kSlidingAttention ? LayerType::kSliding : LayerType::kFull;
  }
}

nlohmann::ordered_json layer_types_json(const std::vector<LayerType>& types) {
  auto json = nlohmann::ordered_json::array();
  for (const LayerType type : types) {
    json.push_back(type == LayerType::kSliding ? kSlidingAttention : kFullAttention);
  }
  return json;
}

void read_tokens(ConfigReader& keys, ModelSpec& spec) {
  // A negative padding index counts from the end, as torch's embedding reads it.
  const auto pad = keys.integer("pad_token_id", {-spec.vocab_size, spec.vocab_size - 1});
  if (pad) spec.pad_token_id = *pad < 0 ? *pad + spec.vocab_size : *pad;
  constexpr IntRange kToken{-1, std::int64_t{1} << 31};
  spec.bos_token_id = keys.integer("bos_token_id", kToken);
  spec.eos_token_ids = keys.integers("eos_token_id", kToken);
}

double read_attention_dropout(ConfigReader& keys, Purpose purpose) {
  if (purpose == Purpose::kTraining) {
    keys.expect("attention_dropout", 0.0, "dropout is not supported in training");
  }
  return keys.number("attention_dropout", {0.0, 1.0}).value_or(0.0);
}

std::string read_tokenizer(ConfigReader& keys) {
  const std::string name = keys.word("tessera_tokenizer").value_or("");
  if (!name.empty() && name != "bytes") keys.refuse("tessera_tokenizer", "\"bytes\"");
  return name;
}

nlohmann::ordered_json eos_token(const std::vector<std::int64_t>& ids) {
  if (ids.empty()) return nullptr;
  if (ids.size() == 1) return ids.front();
  return ids;
}

void check_total(double elements) {
  constexpr double kMost = 1e18;
  TESSERA_CHECK(elements <= kMost, ErrorKind::kConfig, "config.json: found sizes of about ",
                elements, " parameters, expected at most ", kMost);
}

}  // namespace tessera::models
