// SelfAttention: what a decoder layer needs of its attention, whatever its form.
//
// Short symbols: B rows, T positions. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "nn/kv_cache.h"

namespace tessera::nn {

class SelfAttention : public torch::nn::Module {
 public:
  /// x [B, T, hidden] -> the same shape and dtype.
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  /// Whether decode is there; without it a text is written by whole forwards.
  virtual bool can_decode() const = 0;
  /// The same for positions that follow those of the cache, which they join. No gradient. Errors:
  /// as KvCache::append.
  virtual at::Tensor decode(const at::Tensor& x, KvCache& cache) = 0;
};

}  // namespace tessera::nn
