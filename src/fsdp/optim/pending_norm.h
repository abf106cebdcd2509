// The norm of gradients in two parts: the sums that a rank's device computes, and the norm that its
// host makes of them.
//
// A step reads all its numbers at once (clip_and_read), since a separate read of the norm would
// make the host wait once more. gradient_norm (tessera/clip.h) reads the norm alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/shard.h"

namespace tessera::fsdp {

class PendingNorm {
 public:
  /// Launches, but does not read, the sum of abs(value)^p over the elements of each gradient that
  /// this rank adds, in fp64. kernels.h describes `largest`. Errors: as gradient_norm.
  explicit PendingNorm(const ShardedBase& model, double p = 2.0, double largest = 1.0);

  /// [parameters] fp64, for comm::read_on_host; undefined where this rank adds none.
  const at::Tensor& sums() const { return sums_; }
  /// Returns the sum over all elements of all gradients. It is added parameter by parameter, then
  /// in rank order. `read`: sums() on the host. Collective.
  double sum(const at::Tensor& read) const;

 private:
  const ShardedBase& model_;
  std::vector<std::int64_t> places_;  // ShardView::place_in_model of each
  at::Tensor sums_;
};

/// Does what clip_grad_norm (tessera/clip.h) does for p = 2, and reads `numbers` together with the
/// gradients' sums: they are on the host afterwards. Collective. Errors: as clip_grad_norm.
double clip_and_read(const ShardedBase& model, double max_norm, std::vector<at::Tensor>& numbers);

}  // namespace tessera::fsdp
