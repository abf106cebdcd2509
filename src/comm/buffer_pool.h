// BufferPool: memory for gathers, gradients and wires that is taken and given back every step, so
// that a steady step touches no new page (fresh pages cost six times warm ones:
// docs/performance.md).
//
// Not an allocator for tensors that a user keeps. What is kept free follows what is asked for
// (FreeBlocks): sizes that nobody takes any more are freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

/// Blocks of bytes that wait to be taken again. Two rules bound them. A request that none fits
/// frees the largest of those that are only just too small: the block that is made for it serves
/// their requests, too, so sizes that grow slowly leave no row of blocks behind. And what has not
/// been taken within `patience` requests is freed. A steady step knows nothing of either: where a
/// block is asked for that was freed too early, patience doubles, so that soon a step of any length
/// frees and makes nothing. Threads: one.
class FreeBlocks {
 public:
  /// A block is at most `most_over` times as large as what it is taken for.
  explicit FreeBlocks(double most_over, std::uint64_t patience = 1024)
      : most_over_(most_over), patience_(patience) {}

  /// The smallest that fits, the warmest of several; undefined where none does.
  at::Tensor take(std::int64_t bytes);
  void give_back(at::Tensor block);  ///< [bytes], kByte, of a storage of its own
  void clear();

  std::int64_t bytes() const { return bytes_; }              ///< that wait
  std::int64_t bytes_freed() const { return bytes_freed_; }  ///< so far

 private:
  struct Block {
    at::Tensor memory;
    std::uint64_t since;  ///< requests_ when it came back
  };
  bool fits(std::int64_t block, std::int64_t bytes) const;
  at::Tensor remove(std::size_t index);
  void free(std::size_t index);
  void free_idle();

  double most_over_;
  std::uint64_t patience_;
  std::uint64_t requests_ = 0;
  std::uint64_t looked_ = 0;  // requests_ when idle ones were last looked for
  std::vector<Block> blocks_;
  std::vector<std::int64_t> freed_idle_;  // their sizes, the last ones
  std::int64_t bytes_ = 0;
  std::int64_t bytes_freed_ = 0;
};

/// Threads: one (the rank's own).
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
  /// Of all blocks that there are, taken or free.
  std::int64_t total_bytes() const { return made_bytes_ - free_.bytes_freed(); }
  std::int64_t free_bytes() const { return free_.bytes(); }
  std::int64_t blocks_made() const { return blocks_made_; }  ///< stays still in a steady step

 private:
  at::Device device_;
  FreeBlocks free_{1.5};
  std::int64_t made_bytes_ = 0;
  std::int64_t blocks_made_ = 0;
};

}  // namespace tessera::comm
