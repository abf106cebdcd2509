// The keys of linear attention that Qwen3-Next and Qwen3.5 share, and what both keep in fp32.
//
// Private to those families' readers. Next: ../spec_keys.h, ../qwen3_5/qwen3_5.cpp.
#pragma once

#include <string>
#include <string_view>

#include "models/family.h"
#include "models/keys/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// The rotary share of a head where the key is absent.
inline constexpr double kTurnedPartOfDeltaNet = 0.25;
/// FamilyTraits::layer_keys.
inline constexpr std::string_view kDeltaNetLayerKeys = "layer_types or full_attention_interval";

/// The sizes of linear layers, and which layers are linear.
KeyRows delta_net_rows();
/// Reads what these rows cannot. Errors: kConfig where sizes do not fit each other.
void read_delta_net(ConfigReader& keys, ModelSpec& spec);
KeepInFloat32 delta_net_pins();

/// Leaves out the layer that predicts further tokens, as transformers does.
std::string without_prediction(std::string_view name);

}  // namespace tessera::models
