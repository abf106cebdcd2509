#include "models/model_spec.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "models/family.h"
#include "models/keys/bare_infinity.h"
#include "models/keys/config_reader.h"
#include "models/keys/known_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::size_t kLongestText = std::size_t{4} << 20;

void settle_heads(ModelSpec& spec) {
  if (spec.num_key_value_heads == 0) spec.num_key_value_heads = spec.num_attention_heads;
  check_key_value_heads("num_key_value_heads", spec.num_key_value_heads, spec.num_attention_heads);
  if (spec.head_dim == 0) {
    TESSERA_CHECK(spec.hidden_size % spec.num_attention_heads == 0, ErrorKind::kConfig,
                  "config.json hidden_size: found ", spec.hidden_size,
                  ", expected a multiple of num_attention_heads = ", spec.num_attention_heads,
                  " (there is no head_dim)");
    spec.head_dim = spec.hidden_size / spec.num_attention_heads;
  }
  check_head_dim("head_dim", spec.head_dim,
                 traits(spec.family).rope
                     ? "as rope turns pairs"
                     : "as attention lays out heads in pairs of elements, without rope, too");
}

void check_layer_types(ConfigReader& keys, std::int64_t layers) {
  const nlohmann::json* types = keys.take("layer_types");
  if (types == nullptr) return;
  const std::string expected = concat("a list of ", layers, " times \"full_attention\"");
  if (!types->is_array() || std::cmp_not_equal(types->size(), layers)) {
    keys.refuse("layer_types", expected);
  }
  for (const nlohmann::json& type : *types) {
    TESSERA_CHECK(type == "full_attention", ErrorKind::kConfig, "config.json layer_types: found ",
                  shown(type), ", expected ", expected);
  }
}

/// At least the elements of latent attention: every latent meets x and every head.
double latent_attention_size(const ModelSpec& spec) {
  const MlaSpec& mla = *spec.mla;
  const auto hidden = static_cast<double>(spec.hidden_size);
  const auto heads =
      static_cast<double>(spec.num_attention_heads) * static_cast<double>(spec.attended_dims());
  const auto latents =
      static_cast<double>(mla.kv_lora_rank + mla.qk_rope_head_dim + mla.q_lora_rank.value_or(0));
  return hidden * latents + heads * latents + 2 * heads * hidden;
}

/// The products of a layer with a state, and the filters of its convolution.
double linear_attention_size(const ModelSpec& spec) {
  const DeltaNetSpec& linear = *spec.delta_net;
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const double keys = d(linear.linear_num_key_heads) * d(linear.linear_key_head_dim);
  const double values = d(linear.linear_num_value_heads) * d(linear.linear_value_head_dim);
  return d(spec.hidden_size) * (2 * keys + 3 * values + 2 * d(linear.linear_num_value_heads)) +
         d(linear.linear_conv_kernel_dim) * (2 * keys + values);
}

double mamba_size(const ModelSpec& spec) {
  const MambaSpec& mamba = *spec.mamba;
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const double inner = d(mamba.mamba_num_heads) * d(mamba.mamba_head_dim);
  const double mixed = inner + 2 * d(mamba.n_groups) * d(mamba.ssm_state_size);
  return d(spec.hidden_size) * (2 * inner + mixed + d(mamba.mamba_num_heads)) +
         d(mamba.conv_kernel) * mixed;
}

/// In floating point, which cannot overflow.
void check_total_size(const ModelSpec& spec) {
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const double attention =
      spec.mla ? latent_attention_size(spec)
               : d(spec.hidden_size) * d(spec.head_dim) *
                     (2 * d(spec.num_attention_heads) + 2 * d(spec.num_key_value_heads));
  const double linear = spec.delta_net ? linear_attention_size(spec)
                        : spec.mamba   ? mamba_size(spec)
                                       : 0.0;
  double inner = d(spec.intermediate_size);
  if (spec.moe) {
    // Descriptions hold a name for each of the files' tensors.
    constexpr std::int64_t kMostExperts = std::int64_t{1} << 20;
    TESSERA_CHECK(spec.num_hidden_layers * spec.moe->num_experts <= kMostExperts,
                  ErrorKind::kConfig, "config.json num_experts: found ", spec.moe->num_experts,
                  " in ", spec.num_hidden_layers, " layers, expected at most ", kMostExperts,
                  " in all");
    inner += d(spec.moe->num_experts) * d(spec.moe->moe_intermediate_size) +
             d(spec.moe->shared_intermediate_size);
  }
  const double mlp = 3 * d(spec.hidden_size) * inner;
  const double embeddings = 2 * d(spec.hidden_size) * d(spec.vocab_size);
  const double total = d(spec.num_hidden_layers) * (attention + linear + mlp) + embeddings;
  check_total(total);
}

/// Behind the rows of a family whose module is the decoder (decoder.h).
void read_decoder(ConfigReader& keys, const FamilyTraits& family, Purpose purpose, ModelSpec& spec,
                  LeftKeys& left) {
  settle_heads(spec);
  spec.attention_dropout = read_attention_dropout(keys, purpose);
  if (family.read_ropes != nullptr) {
    family.read_ropes(keys, spec, left);
  } else {
    spec.rope = read_rope(keys,
                          {.theta = spec.rope.theta,
                           .max_position_embeddings = spec.max_position_embeddings,
                           .partial_rotary_factor = family.partial_rotary_factor},
                          left);
  }
  spec.dtype = read_dtype(keys);
  read_tokens(keys, spec);
  spec.tessera_tokenizer = read_tokenizer(keys);
  if (family.read != nullptr) family.read(keys, spec);
  if (std::ranges::find(family.rows, "layer_types", &KeyRow::key) == family.rows.end()) {
    check_layer_types(keys, spec.num_hidden_layers);
  }
  check_total_size(spec);
}

const FamilyTraits& read_family(ConfigReader& keys) {
  std::vector<std::string> architectures;
  if (const nlohmann::json* list = keys.take("architectures")) {
    const bool all_names =
        list->is_array() &&
        std::all_of(list->begin(), list->end(), [](auto& name) { return name.is_string(); });
    if (!all_names) keys.refuse("architectures", "a list of one name");
    architectures = list->get<std::vector<std::string>>();
  }
  return family_of(architectures, keys.word("model_type").value_or(""));
}

void check_divides(std::string_view key, int degree, std::string_view what, std::int64_t size) {
  TESSERA_CHECK(size % degree == 0, ErrorKind::kConfig, "parallelism.", key, ": found ", degree,
                ", expected a divisor of ", what, " = ", size);
}

constexpr std::string_view kTp = "tensor_parallel_degree";
constexpr std::string_view kCp = "context_parallel_degree";
constexpr std::string_view kEp = "expert_parallel_degree";
constexpr std::string_view kEtp = "expert_tensor_parallel_degree";

void check_heads(std::int64_t kv, int tp) {
  TESSERA_CHECK(kv % tp == 0 || tp % kv == 0, ErrorKind::kConfig, "parallelism.", kTp, ": found ",
                tp, ", expected a divisor or a multiple of num_key_value_heads = ", kv);
}

void check_expert_degrees(const ModelSpec& spec, const ParallelDims& degrees) {
  const bool routes = !routed_experts(spec).layers.empty();
  TESSERA_CHECK(routes || (degrees.ep == 1 && degrees.etp == 1), ErrorKind::kConfig, "parallelism.",
                degrees.ep > 1 ? kEp : kEtp, ": found ", degrees.ep > 1 ? degrees.ep : degrees.etp,
                " for a model without experts, expected 1");
  if (!routes) return;
  check_divides(kEp, degrees.ep, "the number of experts", spec.moe->num_experts);
  check_divides(kEtp, degrees.etp, "moe_intermediate_size", spec.moe->moe_intermediate_size);
}

/// A state runs over the positions of a row, one after the other.
void check_no_states(const ModelSpec& spec, int cp) {
  constexpr int kShown = 8;
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    if (spec.is_linear(layer)) layers.push_back(layer);
  }
  TESSERA_CHECK(layers.empty(), ErrorKind::kConfig, "parallelism.", kCp, ": found ", cp,
                " with layers ", ranges_text(layers, ", ", kShown), " of ",
                spec.mamba ? "Mamba-2" : "the gated delta rule",
                ", expected 1: their state is not passed between the ranks that share a row; take ",
                kCp, " = 1");
}

void check_context(const ModelSpec& spec, const ParallelDims& degrees) {
  if (degrees.cp == 1) return;
  check_no_states(spec, degrees.cp);
  if (degrees.context_form != ContextForm::kHeads) return;
  const std::int64_t ranks = std::int64_t{degrees.cp} * degrees.tp;
  // Latent attention widens to as many keys as queries.
  for (const std::int64_t heads :
       spec.mla ? std::vector{spec.num_attention_heads} : key_value_heads(spec)) {
    TESSERA_CHECK(heads % ranks == 0, ErrorKind::kConfig,
                  "parallelism.context_parallel_form: found heads over ", kCp, " ", degrees.cp,
                  " x ", kTp, " ", degrees.tp, ", expected a divisor of ",
                  spec.mla ? "num_attention_heads" : "num_key_value_heads", " = ", heads,
                  "; take \"gather\", which has no such limit, or lower a degree");
  }
}

/// Returns the text_config, with the keys about the text that are outside of it.
nlohmann::json text_config(const nlohmann::json& whole, const FamilyTraits& family,
                           LeftKeys& left) {
  ConfigReader keys(whole);
  const nlohmann::json* text = keys.take("text_config");
  if (text == nullptr || !text->is_object()) keys.refuse("text_config", "an object");
  nlohmann::json config = *text;
  for (const std::string key :
       {"bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
        "tessera_tokenizer", "tie_word_embeddings", "torch_dtype"}) {
    const nlohmann::json* outer = keys.take(key);
    if (outer != nullptr && !config.contains(key)) config[key] = *outer;
  }
  if (family.whole->as_text_model != nullptr) {
    family.whole->as_text_model(ConfigReader(*text, "text_config."), config);
  }
  config["architectures"] = {family.architecture};
  keys.ignore({"architectures", "initializer_range", "model_type", "vision_config"});
  for (const std::string_view key : family.whole->other_keys) keys.ignore({key});
  settle_left_keys(keys, nullptr, left);
  return config;
}

/// The text model's own where the file describes more.
nlohmann::json of_text(nlohmann::json config, LeftKeys& left) {
  for (const FamilyTraits* family : families()) {
    if (is_whole_of(*family, config)) return text_config(config, *family, left);
  }
  return config;
}

}  // namespace

ParsedSpec parse_spec(std::string_view json_text, const SpecOptions& options) {
  TESSERA_CHECK(json_text.size() <= kLongestText, ErrorKind::kFormat, "config.json: found ",
                json_text.size(), " bytes, expected at most ", kLongestText);
  ParsedSpec result;
  LeftKeys left;
  const nlohmann::json parsed =
      of_text(parse_json_object(spell_bare_infinity(json_text), "config.json"), left);
  ConfigReader keys(parsed);
  const FamilyTraits& family = read_family(keys);
  result.spec = family.spec;
  read_rows(family.rows, keys, result.spec);
  if (family.read_all != nullptr) {
    family.read_all(keys, options.purpose, result.spec, left);
  } else {
    read_decoder(keys, family, options.purpose, result.spec, left);
  }
  if (family.read_prediction_layers != nullptr) {
    result.prediction_layers = family.read_prediction_layers(keys);
  }
  // A family with its own module has other keys for these values.
  settle_left_keys(keys, family.read_all == nullptr ? &result.spec : nullptr, left);
  result.ignored_keys = left.ignored;
  const auto& unknown = left.unknown;
  if (options.purpose == Purpose::kTraining && family.not_dropped != nullptr) {
    const std::string keys_of_dropout = family.not_dropped(result.spec);
    if (!keys_of_dropout.empty()) {
      result.warnings.push_back("found " + keys_of_dropout +
                                ": trained without dropout; what is exported says them still");
    }
  }
  if (options.unknown_keys == UnknownKeys::kWarn) {
    for (const std::string& line : unknown) {
      result.warnings.push_back("unknown key ignored: " + line);
    }
  } else if (!unknown.empty()) {
    throw Error(ErrorKind::kConfig,
                concat("config.json: found the unknown key ", unknown.front(),
                       unknown.size() > 1 ? concat(" and ", unknown.size() - 1, " more") : "",
                       ", expected keys of ", family.architecture,
                       "; set model.allow_unknown_config_keys to ignore them"));
  }
  return result;
}

std::optional<std::int64_t> prediction_layer(const ParsedSpec& parsed, std::string_view published) {
  constexpr std::string_view kLayerNames = "model.layers.";
  if (!published.starts_with(kLayerNames)) return std::nullopt;
  const std::string_view rest = published.substr(kLayerNames.size());
  std::int64_t layer = 0;
  const auto [end, failed] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
  const bool is_number = failed == std::errc{} && end != rest.data() + rest.size() && *end == '.';
  const std::int64_t first = parsed.spec.num_hidden_layers;
  const bool is_one = is_number && layer >= first && layer < first + parsed.prediction_layers;
  return is_one ? std::optional(layer) : std::nullopt;
}

RoutedExperts routed_experts(const ModelSpec& spec) {
  if (!spec.moe) return {};
  RoutedExperts routed{spec.moe->num_experts, spec.moe->experts_per_token, {}};
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    if (spec.is_moe(i)) routed.layers.push_back(i);
  }
  return routed;
}

namespace {

/// Every position reads and writes one state, which costs as much as so many positions behind a
/// window of one would.
LayerAttention linear_attention_of(const ModelSpec& spec) {
  if (spec.mamba) {
    constexpr std::int64_t kOfMamba = 2;  // what is read of it, what is added
    const std::int64_t state = spec.mamba->inner_size() * spec.mamba->ssm_state_size;
    return {kOfMamba * state / spec.num_attention_heads, 1};
  }
  const DeltaNetSpec& linear = *spec.delta_net;
  constexpr std::int64_t kProducts = 3;  // what is read of it, what is known already, what is added
  const std::int64_t state = linear.value_size() * linear.linear_key_head_dim;
  return {kProducts * state / spec.num_attention_heads, 1};
}

}  // namespace

LayerAttention attention_of(const ModelSpec& spec, std::int64_t layer) {
  const auto own = traits(spec.family).attention_of;
  if (own != nullptr) return own(spec, layer);
  if (spec.sees_nothing(layer)) return {};
  if (spec.is_linear(layer)) return linear_attention_of(spec);
  LayerAttention of{spec.attended_dims()};
  if (spec.is_sliding(layer)) of.window = spec.sliding_window;
  return of;
}

std::vector<std::int64_t> key_value_heads(const ModelSpec& spec) {
  const auto own = traits(spec.family).key_value_heads;
  return own != nullptr ? own(spec) : std::vector{spec.num_key_value_heads};
}

std::optional<ImageTokens> image_tokens(const ModelSpec& spec) {
  const auto own = traits(spec.family).image_tokens;
  return own != nullptr ? own(spec) : std::nullopt;
}

std::string config_json(const ModelSpec& spec) {
  Json json = written_by(traits(spec.family).rows, spec);
  if (!spec.tessera_tokenizer.empty()) json["tessera_tokenizer"] = spec.tessera_tokenizer;
  return json.dump(2) + "\n";
}

std::vector<std::int64_t> generation_end_tokens(std::string_view text, std::string_view where) {
  const nlohmann::json object = parse_json_object(text, where);
  const auto found = object.find("eos_token_id");
  if (found == object.end() || found->is_null()) return {};
  std::vector<std::int64_t> ids;
  for (const nlohmann::json& id : found->is_array() ? *found : nlohmann::json::array({*found})) {
    TESSERA_CHECK(id.is_number_integer(), ErrorKind::kFormat, where, ": eos_token_id: found ",
                  shown(*found), ", expected a token id or a list of them");
    ids.push_back(id.get<std::int64_t>());
  }
  return ids;
}

void check_learned_positions(const ModelSpec& spec, std::int64_t positions) {
  TESSERA_CHECK(!traits(spec.family).learned_positions || positions <= spec.max_position_embeddings,
                ErrorKind::kConfig, "training.seq_len: found rows of ", positions,
                " tokens, expected at most ", spec.max_position_embeddings,
                ", the positions that the model has learned (n_positions)");
}

void check_degrees(const ModelSpec& spec, const ParallelDims& degrees) {
  check_expert_degrees(spec, degrees);
  check_context(spec, degrees);
  const int tp = degrees.tp;
  check_divides(kTp, tp, "num_attention_heads", spec.num_attention_heads);
  check_divides(kTp, tp, "vocab_size", spec.vocab_size);
  check_divides(kTp, tp, "intermediate_size", spec.intermediate_size);
  if (spec.moe && spec.moe->shared_intermediate_size > 0) {
    check_divides(kTp, tp, "the inner size of shared experts", spec.moe->shared_intermediate_size);
  }
  for (const std::int64_t heads : key_value_heads(spec)) check_heads(heads, tp);
  // A state belongs to one rank, with the key head that reads it.
  if (spec.delta_net) {
    check_divides(kTp, tp, "linear_num_key_heads", spec.delta_net->linear_num_key_heads);
  }
  if (spec.mamba) check_divides(kTp, tp, "n_groups", spec.mamba->n_groups);
  // Ranks that share a key head would hold different gradients of parts of one matrix.
  if (traits(spec.family).fused_projections) {
    check_divides(kTp, tp, "num_key_value_heads", spec.num_key_value_heads);
  }
}

}  // namespace tessera::models
