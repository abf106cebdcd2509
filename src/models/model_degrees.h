// Model degrees: how many ranks share a model beyond the data axes, and in which form.
//
// Next: model_layout.h.
#pragma once

#include <cstdint>

namespace tessera::models {

/// What each tensor-parallel rank holds of the tokens between two layers.
enum class SequenceParallel : std::uint8_t {
  kNo,   ///< all of them, the same on every rank
  kYes,  ///< an equal part of every row's positions
};

/// Which tokens the router of a rank sees where experts are not cut over tp.
enum class RouterTokens : std::uint8_t {
  kShards,  ///< an equal part of them
  kAll,     ///< all, on every tensor-parallel rank: for checking and comparison
};

struct ModelDegrees {
  int tp = 1;
  int ep = 1;
  int etp = 1;  ///< 1, or tp: every expert is cut as the other layers are
  SequenceParallel sequence = SequenceParallel::kYes;
  RouterTokens router = RouterTokens::kShards;
  bool operator==(const ModelDegrees&) const = default;
};

}  // namespace tessera::models
