// GatherBuffer: how a unit gets unsharded memory, and how that memory answers while there is none.
//
// One flat buffer of a bucket in its compute dtype. Its storage object lives as long as the bucket,
// and the unsharded parameters are views of it; the bytes come and go. Tensors that autograd saved
// share the storage and see the data again after the next gather, with an unchanged version
// counter. While there are no bytes, any access throws our message ([Note: release]); a storage
// resized to zero would crash, or show another unit's weights. Backends with memory of their own
// (shared memory, registered memory) belong behind this class. Source: c10/core/StorageImpl.h
// (release_data_and_set_meta_custom_data_ptr_error_msg_).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "comm/buffer_pool.h"
#include "comm/group.h"

namespace tessera::comm {

class GatherBuffer {
 public:
  /// `numel` of the whole buffer, a multiple of `ranks`. `released_message` is what an access to
  /// released memory throws.
  GatherBuffer(std::shared_ptr<BufferPool> pool, at::ScalarType dtype, std::int64_t numel,
               int ranks, int rank, std::string released_message);
  ~GatherBuffer() { hide(); }  ///< tensors that outlive it throw, too
  GatherBuffer(const GatherBuffer&) = delete;
  GatherBuffer& operator=(const GatherBuffer&) = delete;

  /// Takes memory from the pool; the views still throw.
  void begin();
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
