// Parallel dims: how many ranks share a run on each axis, and in which form they share a model.
//
// Pure. What is asked for may leave a degree open (train/config.h); here every one is known.
// Next: mesh_shape.h for the ranks themselves, ../models/model_degrees.h for what a model allows.
#pragma once

#include <cstdint>

namespace tessera {

/// What each tensor-parallel rank holds of the tokens between two layers.
enum class SequenceParallel : std::uint8_t {
  kNo,   ///< all positions, the same on every rank: Invariant over the axis
  kYes,  ///< positions [rank * T / n, (rank + 1) * T / n) of every row: Shard(1)
};

}  // namespace tessera
