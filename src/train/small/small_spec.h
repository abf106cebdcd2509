// The same model in small: each kind of its layers, with sizes of a few numbers.
//
// The properties that decide how a model is cut stay: which layers there are, whether ranks of tp
// have key heads of their own, groups of experts, windows shorter than a row. `tessera check` runs
// it on all ranks of a layout and on one. No torch in this header. Next: small_run.h.
#pragma once

#include <cstdint>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"

namespace tessera::train {

/// The positions of a row that windows and chunks of the small model are shorter than.
inline constexpr std::int64_t kSmallPositions = 16;

/// The degrees of the small model, each at most 2, but tp where ranks of tp share key heads: 4 of 2
/// heads. `full`: the degrees of `spec`.
ParallelDims small_degrees(const models::ModelSpec& spec, const ParallelDims& full);

/// With at least `layers` layers, at least one of each kind of `spec`, in its order. check_degrees
/// of small_degrees(spec, full) accepts it.
models::ModelSpec small_spec(const models::ModelSpec& spec, const ParallelDims& full,
                             std::int64_t layers);

}  // namespace tessera::train
