// The keys of a config.json that describe rotary embeddings, in both spellings.
//
// Private to the families' readers. Next: spec_keys.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "models/config_reader.h"
#include "nn/rope_options.h"

namespace tessera::models {

/// rope_parameters, or rope_scaling beside rope_theta; the record names its kind as rope_type or as
/// type. `default_theta` is the family's where neither place has one. Keys of the record that
/// nobody knows are added to `unknown`. Errors: kConfig for a kind or a value that is not
/// supported.
nn::RopeOptions read_rope(ConfigReader& keys, double default_theta,
                          std::vector<std::string>& unknown);

/// The record rope_scaling as the hub's configs have it, null for plain rope; `type_key` is the
/// family's name of the key: rope_type or type.
nlohmann::ordered_json rope_scaling_json(const nn::RopeOptions& rope, std::string_view type_key);

}  // namespace tessera::models
