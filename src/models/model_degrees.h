// Model degrees: how many ranks share a model beyond the data axes, and in which form.
//
// What each rank then holds of a tensor its layer declares (nn/declaration.h). Next: model_axes.h.
#pragma once

#include <cstdint>

#include "layout/parallel_dims.h"

namespace tessera::models {

struct ModelSpec;

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

/// Errors: kConfig naming the key of [parallelism], what was found and what would divide.
void check_degrees(const ModelSpec& spec, const ModelDegrees& degrees);

}  // namespace tessera::models
