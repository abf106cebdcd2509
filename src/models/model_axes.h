// ModelAxes: the axes of a mesh that a model's layers communicate over, and which of its forms it
// has. Made once for a model, copied into its layers.
//
// Next: model_spec.h, decoder_layer.h, moe_layer.h, ../nn/tensor_region.h.
#pragma once

#include "models/model_spec.h"
#include "moe/experts.h"
#include "nn/tensor_region.h"
#include "parallel/axis.h"

namespace tessera::models {

struct ModelAxes {
  ParallelDims degrees;  ///< those of one rank by default
  nn::TensorRegion tensor;
  parallel::Axis experts;
  moe::Score score = moe::Score::kAfterExperts;
};

}  // namespace tessera::models
