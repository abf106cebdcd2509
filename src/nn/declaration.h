// Declaration: a layer's statement about one of its own parameters, made where it is registered.
//
// Pure. Contracts, bucket plans, files, initial values and `inspect` are all read off what the
// layers of a model declare (models/description.h). Sizes are the tensor's. Next: parameter.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layout/fused_matrices.h"
#include "tessera/placement.h"

namespace tessera::nn {

/// How a parameter begins where no file has its values.
enum class InitKind : std::uint8_t {
  kNormal,  ///< mean 0, the model's standard deviation
  kOnes,
  kZeros,
  kUniform,  ///< within 1 / sqrt(inputs) of 0, inputs being the last dim of the whole parameter
  kLogOfUniform,     ///< the logarithm of a number from 0.01 to 16
  kLogOfNumber,      ///< the logarithms of 1, 2, 3 and so on
  kInverseSoftplus,  ///< its softplus is a step (StepRange)
};

/// The first steps of a state: uniform in the logarithm from `least` to `most`, and at least
/// `floor`.
struct StepRange {
  double least = 0.001;
  double most = 0.1;
  double floor = 1e-4;
  bool operator==(const StepRange&) const = default;
};

/// The classes that optimizers treat differently; decided by the layer, never by the dims of a
/// (1-D) shard.
enum class DecayClass : std::uint8_t {
  kMatrix,
  kEmbedding,
  kNorm,
  kBias,
  kConvolution,  ///< a filter a channel, which is no matrix
};

struct Declaration {
  ParameterLayout layout = {};  ///< beyond the data axes
  InitKind init = InitKind::kNormal;
  double init_scale = 1.0;  ///< times what kUniform draws
  StepRange steps = {};     ///< of kInverseSoftplus
  DecayClass decay = DecayClass::kMatrix;
  /// Where files hold a tensor for each index of dim 0 and each of these parts, which share dim 1
  /// equally: their names after the module's own ("gate_proj.weight": "...experts.7.gate_proj
  /// .weight"). Empty = files hold one tensor of the parameter's name.
  std::vector<std::string> parts = {};
  /// The matrices that the last two dims hold.
  layout::FusedMatrices fused = {};
};

/// Declares a norm's weight.
inline Declaration norm_weight(ParameterLayout layout) {
  return {.layout = std::move(layout), .init = InitKind::kOnes, .decay = DecayClass::kNorm};
}
/// Declares a bias.
inline Declaration bias_of_layer(ParameterLayout layout, InitKind init = InitKind::kZeros) {
  return {.layout = std::move(layout), .init = init, .decay = DecayClass::kBias};
}

}  // namespace tessera::nn
