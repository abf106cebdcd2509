// The gradients' norm in two parts: what a rank's device works out, and what its host makes of that.
//
// A step reads all its numbers at once: a read of its own for the norm would let the host wait once
// more (train/trainer.cpp). Who reads the norm alone calls gradient_norm (tessera/clip.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/shard.h"

namespace tessera::fsdp {

class PendingNorm {
 public:
  /// Of |value|^p over the elements of each gradient that this rank adds, in fp64; kernels.h says what
  /// `largest` is for. Launched, not read. Errors: as gradient_norm.
  explicit PendingNorm(const ShardedBase& model, double p = 2.0, double largest = 1.0);

  /// [parameters] fp64, for comm::read_on_host; undefined where this rank adds none.
  const at::Tensor& sums() const { return sums_; }
  /// The sum over all elements of all gradients; `read`: sums() on the host. Added parameter by
  /// parameter, then in rank order. Collective.
  double sum(const at::Tensor& read) const;

 private:
  const ShardedBase& model_;
  std::vector<std::int64_t> places_;  // ShardView::place_in_model of each
  at::Tensor sums_;
};

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)); not where max_norm <= 0, nor by a norm
/// that is not finite.
void clip(const ShardedBase& model, double norm, double max_norm);

}  // namespace tessera::fsdp
