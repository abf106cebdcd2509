// Memory that is taken and given back every step, and how a unit's unsharded parameters lie in it.
//
// BufferPool: memory for gathers, gradients and wires, so that a steady step accesses no new page
// (fresh pages cost six times warm ones: docs/performance.md). Not an allocator for tensors that a
// user keeps. What is kept free follows what is asked for (FreeBlocks): sizes that nobody takes any
// more are freed.
//
// [Note: memory carries its event] On a device giving back is an act of the host with a meaning for
// streams: the block is free from that point of the current stream on. It carries an event there,
// behind which whoever takes it comes, and so does the allocator before it is freed. So blocks go
// round in the host's order, and no caching allocator has to know who reads them
// (record_stream keeps memory for how long nobody knows; on views of a GatherBuffer it does
// nothing). The one that came back first goes out first: its last use is over first.
//
// GatherBuffer: one flat buffer of a bucket in its compute dtype. Its storage object lives as long
// as the bucket, and the unsharded parameters are views of it; the bytes come and go. Tensors that
// autograd saved share the storage and see the data again after the next gather, with an unchanged
// version counter. While there are no bytes, any access throws our message ([Note: release]); a
// storage resized to zero would crash, or show another unit's weights. Backends with memory of
// their own (shared memory, registered memory) belong behind this class. Source:
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

/// Blocks of bytes that wait to be taken again. Two rules bound them. A request that none fits
/// frees the largest of those that are only just too small: the block that is made for it serves
/// their requests, too, so sizes that grow slowly leave no row of blocks behind. And what has not
/// been taken within `patience` requests is freed. A steady step knows nothing of either: where a
/// block is asked for that was freed too early, patience doubles, so that soon a step of any length
/// frees and makes nothing. Threads: one.
class FreeBlocks {
 public:
  struct Block {
    at::Tensor memory;  ///< [bytes], kByte, of a storage of its own; undefined: none
    Event used = {};    ///< behind its last use
  };

  /// A block is at most `most_over` times as large as what it is taken for. `allocator`: the stream
  /// that blocks are allocated on, of a device.
  explicit FreeBlocks(double most_over, Stream allocator = {}, std::uint64_t patience = 1024)
      : most_over_(most_over), allocator_(allocator), patience_(patience) {}
  ~FreeBlocks();
  FreeBlocks(const FreeBlocks&) = delete;
  FreeBlocks& operator=(const FreeBlocks&) = delete;

  /// The one at `wanted`, if it is free and fits; else the smallest that fits: on the CPU the warmest of
  /// several, on a device the one that came back first.
  Block take(std::int64_t bytes, const void* wanted = nullptr);
  void recycle(Block block);
  void clear();
  /// Frees what has not been taken since there had been so many requests.
  void clear_idle_since(std::uint64_t requests);

  std::uint64_t requests() const { return requests_; }       ///< so far
  std::int64_t bytes() const { return bytes_; }              ///< that wait
  std::int64_t bytes_freed() const { return bytes_freed_; }  ///< so far

 private:
  struct Waiting {
    Block block;
    std::uint64_t since;  ///< requests_ when it came back
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
  std::uint64_t looked_ = 0;  // requests_ when idle ones were last looked for
  std::vector<Waiting> blocks_;
  std::vector<std::int64_t> freed_idle_;  // their sizes, the last ones
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

  /// A 1-D tensor with undefined contents: the smallest free block that is at most a half too
  /// large, else new. For use on the current stream.
  at::Tensor take(std::int64_t numel, at::ScalarType dtype) {
    return take(numel, dtype, Stream::current(device_));
  }
  /// The same for use on `on`.
  at::Tensor take(std::int64_t numel, at::ScalarType dtype, const Stream& on);
  /// Every tensor that take() gave comes back here once: free from here on of the current stream.
  void recycle(at::Tensor tensor) {
    recycle(std::move(tensor), device_.is_cpu() ? Event() : used_here());
  }
  /// Free from `used` on.
  void recycle(at::Tensor tensor, Event used);
  /// Frees what is not taken.
  void trim() { free_.clear(); }
  /// Frees what has not been taken since then, where another step than those before has begun. The
  /// rest stays: memory that goes back to an allocator comes again in other places.
  void trim_idle_since(std::uint64_t requests) { free_.clear_idle_since(requests); }
  std::uint64_t requests() const { return free_.requests(); }  ///< so far
  /// A step of a model begins. What is taken in it as it was in the last one, in the same order and of
  /// the same sizes, is given the same blocks on a CPU: addresses stay from step to step. Twice in a row:
  /// nothing of the last one comes again.
  void begin_step();

  at::Device device() const { return device_; }
  /// Of all blocks that there are, taken or free.
  std::int64_t total_bytes() const { return made_bytes_ - free_.bytes_freed(); }
  std::int64_t free_bytes() const { return free_.bytes(); }
  std::int64_t blocks_made() const { return blocks_made_; }  ///< stays still in a steady step

 private:
  Event used_here();
  at::Tensor make(std::int64_t bytes, const Stream& on);

  at::Device device_;
  /// What the caching allocator knows of: nothing is launched on it, and it is behind the last use
  /// of whatever was freed.
  Stream allocator_;
  FreeBlocks free_;
  struct Taken {
    std::int64_t bytes;
    const void* memory;
  };
  std::vector<Taken> last_step_, step_;  // in their order, the first kTakenKnown of them
  bool has_steps_ = false;
  std::vector<Event> events_;  // of blocks that are taken, to be recorded again
  std::int64_t made_bytes_ = 0;
  std::int64_t blocks_made_ = 0;
};

class GatherBuffer {
 public:
  /// `numel` of the whole buffer, a multiple of `ranks`. `released_message` is what an access to
  /// released memory throws.
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
  /// After the gather has completed: the views show the data.
  void publish();
  /// Gives the memory back; the views throw again.
  void end();
  /// Makes the views show `flat` (numel elements, compute dtype) for good: one rank that computes
  /// in its storage dtype needs neither memory nor copies.
  void alias(const at::Tensor& flat);

  /// A view of elements [offset, offset + numel of sizes), made once; its bytes follow the buffer.
  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const;
  bool published() const { return published_; }
  /// What every view of it shows, for comparison; the same for good.
  const c10::StorageImpl* storage() const { return storage_.unsafeGetStorageImpl(); }
  void set_released_message(std::string message);
  /// Takes its memory from another pool from now on; not while it holds any.
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
