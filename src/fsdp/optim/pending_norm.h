// The gradients' norm in two parts: what a rank's device works out, and what its host makes of that.
//
// A step reads all its numbers at once, since a read of its own for the norm would let the host wait
// once more: clip_and_read. Who reads the norm alone calls gradient_norm (tessera/clip.h).
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

/// clip_grad_norm (tessera/clip.h) of p = 2 that reads `numbers` with the gradients' sums, at once:
/// they are on the host afterwards. Collective. Errors: as clip_grad_norm.
double clip_and_read(const ShardedBase& model, double max_norm, std::vector<at::Tensor>& numbers);

}  // namespace tessera::fsdp
