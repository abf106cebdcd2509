// What GPT-2's forward keeps until backward: nn/layer_keeps.h for the layers of this folder. Pure.
#pragma once

#include <memory>

#include "models/keeps/kept_activations.h"

namespace tessera::models {

std::unique_ptr<TextKeeps> keeps_of_gpt2(ModelKeeps& model);

}  // namespace tessera::models
