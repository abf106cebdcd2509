#include "models/gemma4/gemma4_layers.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "models/keys/config_reader.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kGlobalHeadDim = 512;  ///< transformers' default

std::vector<LayerType> read_types(ConfigReader& keys, std::int64_t layers) {
  std::vector<LayerType> types;
  const nlohmann::json* list = keys.take("layer_types");
  const std::string expected = concat("a list of ", layers, " times \"", kSlidingAttention,
                                      "\" or \"", kFullAttention, "\"");
  if (list == nullptr) {
    for (std::int64_t i = 0; i < layers; ++i) {
      types.push_back((i + 1) % 6 != 0 ? LayerType::kSliding : LayerType::kFull);
    }
  } else {
    if (!list->is_array() || std::cmp_not_equal(list->size(), layers)) {
      keys.refuse("layer_types", expected);
    }
    for (const nlohmann::json& type : *list) {
      TESSERA_CHECK(type == kSlidingAttention || type == kFullAttention, ErrorKind::kConfig,
                    "config.json text_config.layer_types: found ", shown(type), ", expected ",
                    expected);
      types.push_back(type == kSlidingAttention ? LayerType::kSliding : LayerType::kFull);
    }
  }
  types.back() = LayerType::kFull;  // as transformers does, even if the list says otherwise
  return types;
}

/// The number of the layer that a key of per_layer_config names. transformers pads the numbers with
/// zeros to the digits of the layer count.
std::optional<std::size_t> layer_number(const std::string& key, std::size_t layers) {
  if (key.empty() || key.size() > std::to_string(layers).size()) return std::nullopt;
  std::size_t number = 0;
  for (const char digit : key) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + static_cast<std::size_t>(digit - '0');
  }
  return number < layers ? std::optional(number) : std::nullopt;
}

void read_per_layer(ConfigReader& keys, const nlohmann::json& overrides, Gemma4Spec& gemma) {
  if (!overrides.is_object()) keys.refuse("per_layer_config", "an object, one record a layer");
  std::set<std::size_t> seen;
  for (const auto& [key, record] : overrides.items()) {
    const auto number = layer_number(key, gemma.layers.size());
    if (!number || !record.is_object() || !seen.insert(*number).second) {
      throw Error(ErrorKind::kConfig,
                  concat("config.json text_config.per_layer_config: found ", shown(key), " = ",
                         shown(record), ", expected records of layers 0 to ",
                         gemma.layers.size() - 1, ", one each"));
    }
    ConfigReader layer(record, concat("text_config.per_layer_config.", key, "."));
    Gemma4Layer& target = gemma.layers[*number];
    target.head_dim = layer.integer("head_dim", kSize).value_or(target.head_dim);
    target.num_key_value_heads =
        layer.integer("num_key_value_heads", kSize).value_or(target.num_key_value_heads);
    const auto others = layer.unknown();
    TESSERA_CHECK(others.empty(), ErrorKind::kConfig, "config.json: found ", others.front(),
                  ", expected only head_dim and num_key_value_heads to differ between layers");
  }
}

void check_layers(const ModelSpec& spec) {
  TESSERA_CHECK(spec.head_dim % 2 == 0 && spec.num_attention_heads % spec.num_key_value_heads == 0,
                ErrorKind::kConfig, "config.json text_config: found head_dim ", spec.head_dim,
                " and num_key_value_heads ", spec.num_key_value_heads,
                ", expected an even number and a divisor of num_attention_heads = ",
                spec.num_attention_heads);
  std::optional<std::int64_t> head_dims[2];
  for (std::size_t i = 0; i < spec.gemma4->layers.size(); ++i) {
    const Gemma4Layer& layer = spec.gemma4->layers[i];
    check_key_value_heads(concat("text_config num_key_value_heads of layer ", i),
                          layer.num_key_value_heads, spec.num_attention_heads);
    check_head_dim(concat("text_config head_dim of layer ", i), layer.head_dim);
    auto& expected = head_dims[layer.type == LayerType::kFull ? 1 : 0];
    TESSERA_CHECK(!expected || *expected == layer.head_dim, ErrorKind::kConfig,
                  "config.json text_config head_dim of layer ", i, ": found ", layer.head_dim,
                  ", expected ", expected.value_or(0),
                  " as in the other layers of its type, which share one rope table");
    expected = layer.head_dim;
  }
}

const char* name_of(LayerType type) {
  return type == LayerType::kSliding ? kSlidingAttention : kFullAttention;
}

nn::RopeOptions default_rope(LayerType type) {
  if (type == LayerType::kSliding) return {.theta = 1e4};
  return {.theta = 1e6, .type = nn::RopeType::kProportional, .partial_rotary_factor = 0.25};
}

nn::RopeOptions read_layer_rope(const nlohmann::json& record, LayerType type,
                                std::vector<std::string>& unknown) {
  ConfigReader keys(record, concat("text_config.rope_parameters.", name_of(type), "."));
  nn::RopeOptions rope;
  const std::string kind = keys.word("rope_type").value_or("default");
  if (kind != "default" && kind != "proportional") {
    keys.refuse("rope_type", "\"default\" or \"proportional\"");
  }
  const auto theta = keys.number("rope_theta", kTheta);
  if (!theta) keys.refuse("rope_theta", "a number");
  rope.theta = *theta;
  if (kind == "proportional") {
    rope.type = nn::RopeType::kProportional;
    rope.partial_rotary_factor = keys.number("partial_rotary_factor", {0.0, 1.0}).value_or(1.0);
    rope.factor = keys.number("factor", {1e-6, 1e9}).value_or(1.0);
  } else {
    keys.expect("partial_rotary_factor", 1.0, "rope of type default turns every element of a head");
    keys.expect("factor", 1.0, "rope of type default has none");
  }
  for (std::string& line : keys.unknown()) unknown.push_back(std::move(line));
  return rope;
}

nlohmann::ordered_json rope_json(const nn::RopeOptions& rope) {
  nlohmann::ordered_json json;
  if (rope.type == nn::RopeType::kProportional) {
    if (rope.factor != 1.0) json["factor"] = rope.factor;
    json["partial_rotary_factor"] = rope.partial_rotary_factor;
  }
  json["rope_theta"] = rope.theta;
  json["rope_type"] = rope.type == nn::RopeType::kProportional ? "proportional" : "default";
  return json;
}

}  // namespace

void read_gemma4_layers(ConfigReader& keys, ModelSpec& spec) {
  Gemma4Spec& gemma = *spec.gemma4;
  gemma.attention_k_eq_v = keys.boolean("attention_k_eq_v").value_or(false);
  for (const LayerType type : read_types(keys, spec.num_hidden_layers)) {
    gemma.layers.push_back({.type = type,
                            .head_dim = spec.head_dim,
                            .num_key_value_heads = spec.num_key_value_heads,
                            .key_is_value = type == LayerType::kFull && gemma.attention_k_eq_v});
  }
  const bool null_head_dim = keys.is_null("global_head_dim");
  const auto head_dim = keys.integer("global_head_dim", kSize);
  const auto kv_heads = keys.integer("num_global_key_value_heads", kSize);
  if (const nlohmann::json* overrides = keys.take("per_layer_config")) {
    read_per_layer(keys, *overrides, gemma);  // the global_ keys have no effect next to it
  } else {
    if (null_head_dim) keys.refuse("global_head_dim", "an integer");
    for (Gemma4Layer& layer : gemma.layers) {
      if (layer.type != LayerType::kFull) continue;
      layer.head_dim = head_dim.value_or(kGlobalHeadDim);
      if (gemma.attention_k_eq_v && kv_heads) layer.num_key_value_heads = *kv_heads;
    }
  }
  check_layers(spec);
}

void read_gemma4_rope(ConfigReader& keys, ModelSpec& spec, std::vector<std::string>& unknown) {
  Gemma4Spec& gemma = *spec.gemma4;
  spec.rope = default_rope(LayerType::kSliding);
  gemma.full_rope = default_rope(LayerType::kFull);
  const nlohmann::json* parameters = keys.take("rope_parameters");
  if (parameters == nullptr) return;
  if (!parameters->is_object()) keys.refuse("rope_parameters", "an object, one record a type");
  ConfigReader types(*parameters, "text_config.rope_parameters.");
  for (const LayerType type : {LayerType::kSliding, LayerType::kFull}) {
    const nlohmann::json* record = types.take(name_of(type));
    if (record == nullptr) {
      const bool occurs = std::ranges::any_of(
          gemma.layers, [&](const Gemma4Layer& layer) { return layer.type == type; });
      if (occurs) types.refuse(name_of(type), "an object");
      continue;
    }
    if (!record->is_object()) types.refuse(name_of(type), "an object");
    (type == LayerType::kSliding ? spec.rope : gemma.full_rope) =
        read_layer_rope(*record, type, unknown);
  }
  for (std::string& line : types.unknown()) unknown.push_back(std::move(line));
}

void write_gemma4_layers(const ModelSpec& spec, nlohmann::ordered_json& text) {
  const Gemma4Spec& gemma = *spec.gemma4;
  text["attention_k_eq_v"] = gemma.attention_k_eq_v;
  text["layer_types"] = nlohmann::ordered_json::array();
  const Gemma4Layer& last = gemma.layers.back();  // always a full one
  bool by_type = gemma.attention_k_eq_v || last.num_key_value_heads == spec.num_key_value_heads;
  auto overrides = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < gemma.layers.size(); ++i) {
    const Gemma4Layer& layer = gemma.layers[i];
    text["layer_types"].push_back(name_of(layer.type));
    auto record = nlohmann::ordered_json::object();
    if (layer.head_dim != spec.head_dim) record["head_dim"] = layer.head_dim;
    if (layer.num_key_value_heads != spec.num_key_value_heads) {
      record["num_key_value_heads"] = layer.num_key_value_heads;
    }
    if (!record.empty()) overrides[std::to_string(i)] = record;
    by_type = by_type && (layer.type == LayerType::kFull ? layer == last : record.empty());
  }
  if (by_type) {
    text["global_head_dim"] = last.head_dim;
    text["num_global_key_value_heads"] = gemma.attention_k_eq_v
                                             ? nlohmann::ordered_json(last.num_key_value_heads)
                                             : nlohmann::ordered_json(nullptr);
  } else {
    text["per_layer_config"] = overrides;
  }
}

void write_gemma4_rope(const ModelSpec& spec, nlohmann::ordered_json& text) {
  text["rope_parameters"] = {{kFullAttention, rope_json(spec.gemma4->full_rope)},
                             {kSlidingAttention, rope_json(spec.rope)}};
}

}  // namespace tessera::models
