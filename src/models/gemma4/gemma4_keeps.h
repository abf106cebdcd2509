// What autograd holds of Gemma 4's layers until their backward (gemma4_layer.cpp), text alone. Pure.
// Next: ../keeps/kept_activations.h.
#pragma once

#include <memory>

#include "models/keeps/kept_activations.h"

namespace tessera::models {

/// FamilyTraits::keeps.
std::unique_ptr<TextKeeps> keeps_of_gemma4(ModelKeeps& model);

}  // namespace tessera::models
