// ParallelDims: the number of ranks on each axis of a run, and the form in which they share a
// model.
//
// Pure. A configuration may leave a degree open (train/config/config.h); here every one is known.
// Next: mesh_shape.h for the ranks themselves, ../models/model_spec.h for what a model allows.
#pragma once

#include <cstdint>

namespace tessera {

/// The tokens that each tensor-parallel rank holds between two layers.
enum class SequenceParallel : std::uint8_t {
  kNo,   ///< all positions, the same on every rank: Invariant over the axis
  kYes,  ///< positions [rank * T / n, (rank + 1) * T / n) of every row: Shard(1)
};

/// The tokens that the router of a rank sees where experts are not cut over tp.
enum class RouterTokens : std::uint8_t {
  kShards,  ///< an equal part of them
  kAll,     ///< all, on every tensor-parallel rank: for checking and comparison
};

/// How attention sees a row whose positions ranks of cp share.
enum class ContextForm : std::uint8_t {
  kGather,  ///< each rank keeps its queries and gathers the keys and values that these see
  kHeads,   ///< all positions of a part of the heads, by an all-to-all (DeepSpeed-Ulysses)
};

/// The degrees; one rank by default.
struct ParallelDims {
  int pp = 1;
  int dp_replicate = 1;
  int dp_shard = 1;
  int cp = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;  ///< 1, or tp: every expert is cut as the other layers are
  ContextForm context_form = ContextForm::kGather;
  /// Equal parts that a row is cut into (context_cut.h): they fix the order of sums. 1 with one
  /// rank of cp is the row as a whole.
  int context_parts = 1;
  SequenceParallel sequence = SequenceParallel::kYes;
  RouterTokens router = RouterTokens::kShards;
  int data_ranks() const { return dp_replicate * dp_shard; }
  /// Returns the number of ranks in a replica that hold the same experts.
  int expert_data() const { return dp_shard * cp * tp / (ep * etp); }
  int world_size() const { return pp * dp_replicate * dp_shard * cp * tp; }
  bool operator==(const ParallelDims&) const = default;
};

}  // namespace tessera
