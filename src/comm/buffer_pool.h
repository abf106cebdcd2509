// Memory that is taken and returned every step, and the place in it of a unit's unsharded
// parameters.
//
// BufferPool is the memory for gathers, gradients and wires, so that a steady step accesses no new
// page (fresh pages cost six times warm ones: docs/performance.md). It is not an allocator for
// tensors that a user keeps. Its free blocks follow the requests (FreeBlocks): sizes that are no
// longer requested are freed.
//
// [Note: memory carries its event] On a device, returning a block is an act of the host that means
// a point of the current stream: from there on the block is free. The block carries an event of
// that point. The stream of the next user is ordered after the event, and so is the allocator's
// stream before the block is freed. So blocks are reused in the host's order, and no caching
// allocator has to know which streams read them (record_stream keeps memory for an unknown time; on
// views of a GatherBuffer it does nothing). The block that was returned first is taken first: its
// last use ends first.
//
// GatherBuffer is one flat buffer of a bucket in its compute dtype. Its storage object lives as
// long as the bucket, and the unsharded parameters are views of it; the bytes come and go. Tensors
// that autograd saved share the storage and see the data again after the next gather, with an
// unchanged version counter. While there are no bytes, any access throws our message ([Note:
// release]); a storage resized to zero would crash, or show another unit's weights. Backends with
// special memory (shared memory, registered memory) belong behind this class. Source:
// c10/core/StorageImpl.h (release_data_and_set_meta_custom_data_ptr_error_msg_).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/stream.h"

namespace tessera::comm {

/// Free blocks of bytes. Two rules bound them. First, a request that none fits frees the largest of
/// the blocks that are slightly too small: the new block serves their requests, too, so sizes that
/// grow slowly leave no row of blocks behind. Second, a block that was not taken within `patience`
/// requests is freed. A steady step is not affected: where a block is requested that was freed too
/// early, patience doubles, so that soon a step of any length frees and makes nothing. Threads:
/// one.
class FreeBlocks {
 public:
  struct Block {
    at::Tensor memory;  ///< [bytes], kByte, with its own storage; undefined: none
    Event used = {};    ///< marks its last use
  };

  /// A block is at most `most_over` times as large as the request that it serves. `allocator` is
  /// the stream of a device on which blocks are allocated.
  explicit FreeBlocks(double most_over, Stream allocator = {}, std::uint64_t patience = 1024)
      : most_over_(most_over), allocator_(allocator), patience_(patience) {}
  ~FreeBlocks();
  FreeBlocks(const FreeBlocks&) = delete;
  FreeBlocks& operator=(const FreeBlocks&) = delete;

  /// Returns the block at `wanted`, if it is free and fits; else the smallest that fits. Of several
  /// of that size it returns the warmest on the CPU, and on a device the one that was returned
  /// first.
  Block take(std::int64_t bytes, const void* wanted = nullptr);
  void recycle(Block block);
  void clear();
  /// Frees the blocks that were not taken since the request of that number.
  void clear_idle_since(std::uint64_t requests);

  std::uint64_t requests() const { return requests_; }       ///< so far
  std::int64_t bytes() const { return bytes_; }              ///< of all free blocks
  std::int64_t bytes_freed() const { return bytes_freed_; }  ///< so far

 private:
  struct Waiting {
    Block block;
    std::uint64_t since;  ///< requests_ when it was returned
    std::int64_t bytes() const { return block.memory.numel(); }
  };
  bool fits(std::int64_t block, std::int64_t bytes) const;
  std::size_t index_of(const void* memory, std::int64_t bytes) const;
  void bring_the_first(std::size_t index);
  Block remove(std::size_t index);
  void free(std::size_t index);
  void free_idle();

  double most_over_;
  Stream allocator_;
  std::uint64_t patience_;
  std::uint64_t requests_ = 0;
  std::uint64_t looked_ = 0;  // requests_ at the last search for idle blocks
  std::vector<Waiting> blocks_;
  std::vector<std::int64_t> freed_idle_;  // sizes of the last ones
  std::int64_t bytes_ = 0;
  std::int64_t bytes_freed_ = 0;
};

/// Threads: one (the rank's thread).
class BufferPool {
 public:
  explicit BufferPool(at::Device device)
      : device_(device), allocator_(Stream::make(device)), free_(1.5, allocator_) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Returns a 1-D tensor with undefined contents: the smallest free block that is at most a half
  /// too large, else a new one. For use on the current stream.
  at::Tensor take(std::int64_t numel, at::ScalarType dtype) {
    return take(numel, dtype, Stream::current(device_));
  }
  /// The same for use on `on`.
  at::Tensor take(std::int64_t numel, at::ScalarType dtype, const Stream& on);
  /// Returns a tensor of take() to the pool, once: it is free after this point of the current
  /// stream.
  void recycle(at::Tensor tensor) {
    recycle(std::move(tensor), device_.is_cpu() ? Event() : used_here());
  }
  /// The same, free after the point `used`.
  void recycle(at::Tensor tensor, Event used);
  /// Frees all blocks that are not taken.
  void trim() { free_.clear(); }
  /// Frees the blocks that were not taken since then, for a step that differs from those before.
  /// The rest stays: memory that an allocator gets back comes again at other addresses.
  void trim_idle_since(std::uint64_t requests) { free_.clear_idle_since(requests); }
  std::uint64_t requests() const { return free_.requests(); }  ///< so far
  /// Marks the beginning of a model's step. On a CPU, requests that repeat those of the last step,
  /// in order and size, get the same blocks: addresses stay the same from step to step. Two calls
  /// in a row forget the last step.
  void begin_step();

  at::Device device() const { return device_; }
  /// The bytes of all blocks, taken or free.
  std::int64_t total_bytes() const { return made_bytes_ - free_.bytes_freed(); }
  std::int64_t free_bytes() const { return free_.bytes(); }
  std::int64_t blocks_made() const { return blocks_made_; }  ///< constant in a steady step

 private:
  Event used_here();
  at::Tensor make(std::int64_t bytes, const Stream& on);

  at::Device device_;
  /// A stream that the caching allocator knows. Nothing is launched on it, and it is ordered after
  /// the last use of every block that was freed.
  Stream allocator_;
  FreeBlocks free_;
  struct Taken {
    std::int64_t bytes;
    const void* memory;
  };
  std::vector<Taken> last_step_, step_;  // in order, the first kTakenKnown of them
  bool has_steps_ = false;
  std::vector<Event> events_;  // of blocks that are taken, to be recorded again
  std::int64_t made_bytes_ = 0;
  std::int64_t blocks_made_ = 0;
};

class GatherBuffer {
 public:
  /// `numel` counts the whole buffer, a multiple of `ranks`. An access to released memory throws
  /// `released_message`.
  GatherBuffer(std::shared_ptr<BufferPool> pool, at::ScalarType dtype, std::int64_t numel,
               int ranks, int rank, std::string released_message);
  ~GatherBuffer();  ///< tensors that outlive it throw, too
  GatherBuffer(const GatherBuffer&) = delete;
  GatherBuffer& operator=(const GatherBuffer&) = delete;

  /// Takes memory from the pool, for use on `on` first; the views still throw.
  void begin(const Stream& on);
  void begin() { begin(Stream::current(pool_->device())); }
  /// [numel / ranks]: where this rank writes its slice, between begin() and publish(); readable
  /// until end().
  at::Tensor writable_slice() const;
  /// The collective that fills the other slices.
  AllGather gather() const;
  /// Makes the views show the data, after the gather has completed.
  void publish();
  /// Returns the memory to the pool; the views throw again.
  void end();
  /// Makes the views show `flat` (numel elements, compute dtype) for good: one rank that computes
  /// in its storage dtype needs neither memory nor copies.
  void alias(const at::Tensor& flat);

  /// A view of elements [offset, offset + numel of sizes), made once; its bytes follow the buffer.
  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const;
  bool published() const { return published_; }
  /// The storage of every view, for comparison; it never changes.
  const c10::StorageImpl* storage() const { return storage_.unsafeGetStorageImpl(); }
  void set_released_message(std::string message);
  /// Takes its memory from another pool from now on; not allowed while it holds memory.
  void use_pool(std::shared_ptr<BufferPool> pool);

 private:
  void show(void* data);
  void hide();

  std::shared_ptr<BufferPool> pool_;
  at::ScalarType dtype_;
  std::int64_t numel_;
  int ranks_;
  int rank_;
  std::string released_message_;
  c10::Storage storage_;
  at::Tensor memory_;   // from the pool, while there is some
  at::Tensor aliased_;  // keeps alias()'s tensor alive
  bool published_ = false;
};

}  // namespace tessera::comm
