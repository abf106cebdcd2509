// Adapters in the layers of a model that has just been made. Next: lora_table.h for which layers.
#pragma once

#include "models/language_model.h"
#include "models/lora_table.h"

namespace tessera::models {

/// Before the model is sharded. Its parameters then are those of parameter_table(spec, lora), the
/// new ones without data.
void add_adapters(LanguageModel& model, const LoraSpec& lora);

}  // namespace tessera::models
