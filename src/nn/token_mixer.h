// TokenMixer: the part of a decoder layer in which positions see each other: attention in its
// forms, or a layer with a state (state/). KvCache: what one such layer remembers of the positions
// that it has already seen.
//
// A decoded token needs the keys and values of all earlier ones, or the state that they left, and
// nothing else. Memory of keys and values is taken for every position at the first append, so that
// decoding allocates nothing that grows. The cache is not for training: nothing in it has a
// gradient. Short symbols: B rows, T (new) positions, N all positions so far, G key/value heads, D
// head_dim. Next: attention/attention.h, state/delta_net.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nn/documents.h"
#include "nn/parameter.h"

namespace tessera::nn {

/// Both undefined before the first positions.
struct LayerState {
  at::Tensor context;  ///< the last inputs of the layer's convolution, [B, width - 1, channels]
  at::Tensor state;    ///< fp32, in the shape that the layer has
};

class KvCache {
 public:
  explicit KvCache(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t length() const { return length_; }      ///< N
  std::int64_t capacity() const { return capacity_; }  ///< most positions

  /// keys [B, G, T, 1, D] as rope_heads gives them, values [B, T, G*D]; undefined, always: there
  /// are only keys (attention/mla.h, whose values are a part of them). Errors: kUsage where there
  /// is no room for them, or where they are of another B, G, D or dtype than before.
  void append(const at::Tensor& keys, const at::Tensor& values);

  at::Tensor keys() const { return keys_.narrow(2, 0, length_); }      ///< view [B, G, N, D]
  at::Tensor values() const { return values_.narrow(2, 0, length_); }  ///< view [B, G, N, D]

  /// Counts positions that changed `state`. Errors: kUsage where there is no room for them.
  void advance(std::int64_t added);
  LayerState state;  ///< of a layer that keeps one in the place of keys and values

 private:
  std::int64_t capacity_;
  std::int64_t length_ = 0;
  at::Tensor keys_, values_;  // [B, G, capacity, D]
};

class TokenMixer : public PlacedModule {
 public:
  /// x [B, T, hidden] of the stream -> the same shape and dtype. Documents are of all positions,
  /// also where the stream has a part of them.
  virtual at::Tensor forward(const at::Tensor& x, const Documents& documents) = 0;
  at::Tensor forward(const at::Tensor& x) { return forward(x, {}); }
  /// The same for positions that follow those of the cache, which they join. No gradient. Errors:
  /// as KvCache::append.
  virtual at::Tensor decode(const at::Tensor& x, KvCache& cache) = 0;
};

}  // namespace tessera::nn
