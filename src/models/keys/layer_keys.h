// The keys of a config.json that say for each layer which earlier positions it sees, and whether it
// has rope.
//
// Private to the families' own readers. Next: ../spec_keys.h, ../spec_parts.h.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/family.h"
#include "models/keys/config_reader.h"
#include "models/model_spec.h"
#include "models/spec_keys.h"

namespace tessera::models {

/// Reads layer_types into spec.layer_types, which holds the meaning of an absent key: layers are
/// full or of `other`. Errors: kConfig.
void read_layer_types(ConfigReader& keys, ModelSpec& spec, LayerType other = LayerType::kSliding);
Json layer_types_json(const ModelSpec& spec);

/// One window for all layers.
void set_all_sliding(ModelSpec& spec);

/// Reads use_sliding_window and layer_types of a family whose windows may be switched off: where
/// they are on and layer_types is absent, the layers that `slides` names have one. Without any the
/// spec has neither types nor a window. Errors: kConfig.
void read_optional_windows(ConfigReader& keys, ModelSpec& spec,
                           const std::function<bool(std::int64_t layer)>& slides);
/// layer_types, sliding_window and use_sliding_window of such a family.
KeyRows optional_window_rows();

/// no_rope_layers: of each layer whether it has rope (1). Where the list is absent or empty, every
/// no_rope_layer_interval-th has none. Errors: kConfig.
std::vector<bool> read_rope_layers(ConfigReader& keys, std::int64_t layers);

}  // namespace tessera::models
