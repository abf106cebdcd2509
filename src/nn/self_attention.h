// SelfAttention: what a decoder layer needs of its attention, whatever its form; and KvCache: keys
// and values of the positions that one attention layer has already seen.
//
// A token that is decoded needs of all earlier ones their keys and values and nothing else. Memory
// for every position is taken at the first append, so that decoding allocates nothing that grows.
// The cache is not for training: nothing in it has a gradient. Short symbols: B rows, T (new)
// positions, N all positions so far, G key/value heads, D head_dim. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "nn/parameter.h"

namespace tessera::nn {

class KvCache {
 public:
  explicit KvCache(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t length() const { return length_; }      ///< N
  std::int64_t capacity() const { return capacity_; }  ///< most positions

  /// keys [B, G, T, 1, D] as rope_heads gives them, values [B, T, G*D]. Errors: kUsage where they
  /// are more than there is room for, or of another B, G, D or dtype than before.
  void append(const at::Tensor& keys, const at::Tensor& values);

  at::Tensor keys() const { return keys_.narrow(2, 0, length_); }      ///< view [B, G, N, D]
  at::Tensor values() const { return values_.narrow(2, 0, length_); }  ///< view [B, G, N, D]

 private:
  std::int64_t capacity_;
  std::int64_t length_ = 0;
  at::Tensor keys_, values_;  // [B, G, capacity, D]
};

class SelfAttention : public PlacedModule {
 public:
  /// x [B, T, hidden] of the stream -> the same shape and dtype.
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  /// Whether decode is there; without it a text is written by whole forwards.
  virtual bool can_decode() const = 0;
  /// The same for positions that follow those of the cache, which they join. No gradient. Errors:
  /// as KvCache::append.
  virtual at::Tensor decode(const at::Tensor& x, KvCache& cache) = 0;
};

}  // namespace tessera::nn
