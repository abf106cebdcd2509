// Gemma 4's layers as values: what differs between them (attention type, head size, key and value
// heads, rope). Private to gemma4.cpp, pure. Next: gemma4_layer.cpp.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/keys/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// layer_types, per_layer_config or the global_ keys, attention_k_eq_v. The spec's head_dim,
/// num_key_value_heads, num_attention_heads and num_hidden_layers are set. Errors: kConfig.
void read_gemma4_layers(ConfigReader& keys, ModelSpec& spec);

/// rope_parameters, one record a layer type.
void read_gemma4_rope(ConfigReader& keys, ModelSpec& spec, std::vector<std::string>& unknown);

/// The other way round, into a text_config.
void write_gemma4_layers(const ModelSpec& spec, nlohmann::ordered_json& text);
void write_gemma4_rope(const ModelSpec& spec, nlohmann::ordered_json& text);

}  // namespace tessera::models
