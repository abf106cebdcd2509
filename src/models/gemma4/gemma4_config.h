// Gemma 4's config.json: three nested configs, of which every key is used, harmless or refused.
//
// Both spellings of the layers' differences are read (global_head_dim and its like, or
// per_layer_config). Source: transformers 5.23, models/gemma4. Private to gemma4.cpp.
// Next: gemma4_spec.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// `keys` of the whole file, whose model_type and architectures are taken; `unknown` collects the
/// nested keys that nobody took. Errors: kConfig, as parse_spec.
ModelSpec read_gemma4(ConfigReader& keys, Purpose purpose, std::vector<std::string>& unknown);

/// The same model in the hub's spelling.
nlohmann::ordered_json gemma4_json(const ModelSpec& spec);

}  // namespace tessera::models
