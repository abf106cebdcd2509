// What a model's sizes allow of degrees: which numbers of ranks can share it.
//
// What each rank then holds of a tensor its layer declares (nn/declaration.h). Next: model_axes.h.
#pragma once

#include "layout/parallel_dims.h"

namespace tessera::models {

struct ModelSpec;

/// What degrees allow of each other is known (train/config_resolve.h). Errors: kConfig naming the
/// key of [parallelism], what was found and what would divide.
void check_degrees(const ModelSpec& spec, const ParallelDims& degrees);

}  // namespace tessera::models
