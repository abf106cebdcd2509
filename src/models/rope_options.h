// From what a config.json says about rope to the tables of nn.
//
// Next: nn/rope.h.
#pragma once

#include <cstdint>

#include "models/rope_spec.h"
#include "nn/rope.h"

namespace tessera::models {

/// Of a head (or a part of one) with `dim` elements that turn; kProportional has its own
/// (gemma4/gemma4_model.cpp).
nn::RopeOptions rope_options(const RopeSpec& rope, std::int64_t dim);

}  // namespace tessera::models
