// TensorRegion: the part of a layer in which the ranks of the tensor-parallel axis share the work,
// between two residual streams.
//
// Between layers (the residual stream) a rank holds an equal part of every row's positions
// (sequence parallel) or all of them; inside, every rank sees all tokens and computes with its part
// of the matrices: a column-parallel product first, a row-parallel one last, whose results are
// addends. A layer names the role of each of its parameters here, and gets the layout that it
// declares (tessera/placement.h). With one rank everything is the identity and declares nothing.
// Source: Megatron-LM's f and g, sequence parallelism included (arXiv 1909.08053, 2205.05198).
// Next: ../parallel/, linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "layout/parallel_dims.h"
#include "parallel/axis.h"
#include "tessera/placement.h"

namespace tessera::nn {

class TensorRegion {
 public:
  TensorRegion() = default;  ///< one rank
  TensorRegion(parallel::Axis axis, SequenceParallel sequence);

  int size() const { return axis_.size; }
  int rank() const { return axis_.rank; }
  const parallel::Axis& axis() const { return axis_; }
  SequenceParallel sequence() const { return sequence_; }
  /// Returns the size of this rank's part of `whole`, cut equally.
  std::int64_t part_of(std::int64_t whole) const { return whole / size(); }

  // Transitions. x [B, T, H] or [B, T / n, H] in the stream.

  /// Stream -> Replicate: all_gather, or a copy whose backward is an all_reduce.
  at::Tensor enter(const at::Tensor& x) const;
  /// Partial -> stream: reduce_scatter or all_reduce.
  at::Tensor leave(const at::Tensor& addend) const;
  /// Invariant, the same on every rank -> stream: the own positions, or nothing to do.
  at::Tensor into_stream(const at::Tensor& x) const;

  // Declarations: what a parameter is on the axis, and its raw gradient.

  ParameterLayout column(int dim = 0) const;  ///< Shard(0): outputs are a part of all
  /// Shard(0) of each part: `rows` of all ranks, one part after the other along dim 0.
  ParameterLayout sections(std::vector<std::int64_t> rows) const;
  ParameterLayout row() const;         ///< Shard(1): inputs are a part of all
  ParameterLayout inside() const;      ///< Replicate, gradient Partial
  ParameterLayout on_stream() const;   ///< inside() where it is cut, else Invariant
  ParameterLayout everywhere() const;  ///< Invariant
  /// Dim 0 cut by so many heads; where they are fewer than the ranks, ranks share one.
  ParameterLayout heads(std::int64_t heads) const;

 private:
  parallel::Axis axis_;
  SequenceParallel sequence_ = SequenceParallel::kNo;
};

/// Key and value heads that one rank computes with.
std::int64_t heads_of_rank(std::int64_t heads, int ranks);

}  // namespace tessera::nn
