// StageLayers: the parts of a model that one stage of a pipeline has. Pure.
//
// pipeline/split.h chooses the stages; a model is made of the stages of one rank (model_axes.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layout/range.h"

namespace tessera::models {

/// The parts of a model that one stage of a pipeline has.
struct StageLayers {
  bool embedding = true;  ///< with all that is before it (a vision tower)
  layout::Range layers;
  bool head = true;  ///< with the final norm
  bool has_layer(std::int64_t number) const {
    return layers.begin <= number && number < layers.end;
  }
  bool operator==(const StageLayers&) const = default;
};

/// The stages of one rank, in the order of the model.
using StagesOfRank = std::vector<StageLayers>;
inline bool has_embedding(const StagesOfRank& stages) {
  return std::ranges::any_of(stages, &StageLayers::embedding);
}
inline bool has_head(const StagesOfRank& stages) {
  return std::ranges::any_of(stages, &StageLayers::head);
}
inline bool has_layer(const StagesOfRank& stages, std::int64_t number) {
  return std::ranges::any_of(stages, [&](const auto& one) { return one.has_layer(number); });
}

}  // namespace tessera::models
