#include "models/qwen3_next/delta_net_keys.h"

#include <nlohmann/json.hpp>

#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kInterval = 4;  ///< every n-th layer is a full one
constexpr IntRange kHeads{1, 65536};
constexpr IntRange kWidth{2, 64};

}  // namespace

KeyRows delta_net_rows() {
  return {
      {"full_attention_interval"},
      written({"layer_types"}, layer_types_json),
      row("linear_conv_kernel_dim", &DeltaNetSpec::linear_conv_kernel_dim, kWidth),
      row("linear_key_head_dim", &DeltaNetSpec::linear_key_head_dim, kHeads),
      row("linear_num_key_heads", &DeltaNetSpec::linear_num_key_heads, kHeads),
      row("linear_num_value_heads", &DeltaNetSpec::linear_num_value_heads, kHeads),
      row("linear_value_head_dim", &DeltaNetSpec::linear_value_head_dim, kHeads),
      turned_part_row(),
  };
}

void read_delta_net(ConfigReader& keys, ModelSpec& spec) {
  check_turned_part(keys, spec);
  const auto said = keys.integer("full_attention_interval", kLayers);
  const std::int64_t interval = said.value_or(kInterval);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    spec.layer_types.push_back((i + 1) % interval == 0 ? LayerType::kFull : LayerType::kLinear);
  }
  const std::vector<LayerType> every_nth = spec.layer_types;
  read_layer_types(keys, spec, LayerType::kLinear);
  if (said && spec.layer_types != every_nth) {
    keys.refuse("layer_types", concat("every n-th a \"", kFullAttention,
                                      "\" as full_attention_interval = ", interval, " says"));
  }
  const DeltaNetSpec& linear = *spec.delta_net;
  if (linear.linear_num_value_heads % linear.linear_num_key_heads != 0) {
    keys.refuse("linear_num_value_heads",
                concat("a multiple of linear_num_key_heads = ", linear.linear_num_key_heads));
  }
}

KeepInFloat32 delta_net_pins() {
  return {
      .strict = {}, .under_float16 = {}, .states = {"linear_attn.A_log", "linear_attn.dt_bias"}};
}

std::string without_prediction(std::string_view name) {
  return name.starts_with("mtp.") ? std::string() : std::string(name);
}

}  // namespace tessera::models
