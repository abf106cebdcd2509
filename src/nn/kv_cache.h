// KvCache: keys and values of the positions that one attention layer has already seen.
//
// A token that is decoded needs of all earlier ones their keys and values and nothing else. Memory
// for every position is taken at the first append, so that decoding allocates nothing that grows.
// Not for training: nothing in here has a gradient. Short symbols: B rows, T new positions, N all
// positions so far, G key/value heads, D head_dim. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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

}  // namespace tessera::nn
