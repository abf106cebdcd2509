// BufferPool: memory for gathers, gradients and wires that is taken and given back every step, so
// that a steady step touches no new page (fresh pages cost six times warm ones:
// docs/performance.md).
//
// Not an allocator for tensors that a user keeps. Threads: one (the rank's own).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

class BufferPool {
 public:
  explicit BufferPool(at::Device device) : device_(device) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A 1-D tensor with undefined contents: the smallest free block that is at most a half too
  /// large, else new.
  at::Tensor take(std::int64_t numel, at::ScalarType dtype);
  /// Every tensor that take() gave comes back here once.
  void give_back(at::Tensor tensor);
  /// Frees what is not taken.
  void trim() { free_.clear(); }

  at::Device device() const { return device_; }
  std::int64_t total_bytes() const {
    return total_bytes_;
  }  ///< of all blocks ever made and not trimmed
  std::int64_t blocks_made() const { return blocks_made_; }  ///< stays still in a steady step

 private:
  at::Device device_;
  std::vector<at::Tensor> free_;  // uint8 blocks
  std::int64_t total_bytes_ = 0;
  std::int64_t blocks_made_ = 0;
};

}  // namespace tessera::comm
