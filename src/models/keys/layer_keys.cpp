#include "models/keys/layer_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tessera/error.h"

namespace tessera::models {
namespace {

const char* word_of(LayerType type) {
  switch (type) {
    case LayerType::kSliding:
      return kSlidingAttention;
    case LayerType::kChunked:
      return kChunkedAttention;
    case LayerType::kFull:
      return kFullAttention;
    case LayerType::kLinear:
      return kLinearAttention;
    case LayerType::kMlp:
    case LayerType::kExperts:
      break;
  }
  TESSERA_INVARIANT(false, "a type of layers without a name");
}

}  // namespace

void read_layer_types(ConfigReader& keys, ModelSpec& spec, LayerType other) {
  const nlohmann::json* types = keys.take("layer_types");
  if (types == nullptr) return;
  const std::string expected = concat("a list of ", spec.num_hidden_layers, " times \"",
                                      word_of(other), "\" or \"", kFullAttention, "\"");
  if (!types->is_array() || std::cmp_not_equal(types->size(), spec.num_hidden_layers)) {
    keys.refuse("layer_types", expected);
  }
  for (std::size_t i = 0; i < types->size(); ++i) {
    const nlohmann::json& type = (*types)[i];
    TESSERA_CHECK(type == word_of(other) || type == kFullAttention, ErrorKind::kConfig,
                  "config.json layer_types: found ", shown(type), ", expected ", expected);
    spec.layer_types[i] = type == kFullAttention ? LayerType::kFull : other;
  }
}

Json layer_types_json(const ModelSpec& spec) {
  auto json = Json::array();
  for (const LayerType type : spec.layer_types) json.push_back(word_of(type));
  return json;
}

void set_all_sliding(ModelSpec& spec) {
  spec.layer_types.assign(static_cast<std::size_t>(spec.num_hidden_layers), LayerType::kSliding);
}

void read_optional_windows(ConfigReader& keys, ModelSpec& spec,
                           const std::function<bool(std::int64_t layer)>& slides) {
  const bool on = keys.boolean("use_sliding_window").value_or(false);
  const bool has_window = spec.sliding_window > 0;
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    spec.layer_types.push_back(on && has_window && slides(i) ? LayerType::kSliding
                                                             : LayerType::kFull);
  }
  read_layer_types(keys, spec);
  if (std::ranges::count(spec.layer_types, LayerType::kSliding) == 0) {
    spec.layer_types.clear();
    spec.sliding_window = 0;
    return;
  }
  if (!on) keys.refuse("use_sliding_window", "true, as layer_types has sliding layers");
  if (!has_window) keys.refuse("sliding_window", "a window, as layer_types has sliding layers");
}

KeyRows optional_window_rows() {
  return {written({"layer_types"},
                  [](const ModelSpec& spec) {
                    return spec.layer_types.empty() ? left_out() : layer_types_json(spec);
                  }),
          window_row(), written({"use_sliding_window"}, [](const ModelSpec& spec) {
            return !spec.layer_types.empty();
          })};
}

std::vector<bool> read_rope_layers(ConfigReader& keys, std::int64_t layers) {
  const std::int64_t interval = keys.integer("no_rope_layer_interval", kLayers).value_or(4);
  std::vector<bool> have_rope;
  const nlohmann::json* list = keys.take("no_rope_layers");
  if (list == nullptr || (list->is_array() && list->empty())) {
    for (std::int64_t i = 0; i < layers; ++i) have_rope.push_back((i + 1) % interval != 0);
    return have_rope;
  }
  const bool is_one_each =
      list->is_array() && std::cmp_equal(list->size(), layers) &&
      std::ranges::all_of(*list, [](const auto& each) { return each == 0 || each == 1; });
  if (!is_one_each) keys.refuse("no_rope_layers", concat("a list of ", layers, " times 0 or 1"));
  for (const nlohmann::json& each : *list) have_rope.push_back(each == 1);
  return have_rope;
}

}  // namespace tessera::models
