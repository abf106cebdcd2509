// Low-rank adapters of a model: which linear layers get one, and how they are added.
//
// A pattern names layers by the end of their names, as peft's target_modules do: "q_proj" is every
// layer's, "layers.0.self_attn.*" those of one layer's attention. The two products of a layer's
// experts are layers, too, named as their parameters are, and only a pattern that says "experts"
// names them: "experts.down_proj", "layers.1.mlp.experts.*". A module that is no linear layer, or
// has no forward of its own that an adapter could be added to, is refused. No torch in this header.
// Next: description.h, ../nn/linear.h, ../moe/expert_adapter.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/lora_spec.h"
#include "models/model_spec.h"

namespace tessera::models {

class LanguageModel;

/// Errors: as check_targets; kConfig for a pattern that matches no layer that can have an adapter,
/// saying what it does match; for a rank above a matrix' smaller dim; for alpha / rank that float32
/// does not hold, or only as 0; for dropout in a vision tower, or of experts' inputs.
LoraSpec plan_lora(const ModelSpec& spec, const LoraRequest& request);

/// Every linear layer that may have an adapter.
std::vector<std::string> adaptable_layers(const ModelSpec& spec);

/// To be called before the model is sharded. The new parameters have no data.
void add_adapters(LanguageModel& model, const LoraSpec& lora);

/// "<layer>.lora_A.weight" or "<layer>.lora_B.weight".
bool is_adapter(std::string_view parameter);
/// The layer of such a name.
std::string adapted_layer(std::string_view adapter);
/// Returns the parameter that an adapter of this layer is added to: the experts' product itself,
/// else "<layer>.weight".
std::string adapted_weight(const std::string& layer);
/// Whether a layer is a product of experts, which a pattern names only by "experts".
bool is_of_experts(std::string_view layer);
std::string adapter_a(const std::string& layer);
std::string adapter_b(const std::string& layer);

}  // namespace tessera::models
