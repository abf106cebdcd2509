#include "comm/gather_buffer.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

#include "tessera/error.h"

namespace tessera::comm {

GatherBuffer::GatherBuffer(std::shared_ptr<BufferPool> pool, at::ScalarType dtype,
                           std::int64_t numel, int ranks, int rank, std::string released_message)
    : pool_(std::move(pool)),
      dtype_(dtype),
      numel_(numel),
      ranks_(ranks),
      rank_(rank),
      released_message_(std::move(released_message)) {
  TESSERA_INVARIANT(numel % ranks == 0, numel, " elements over ", ranks, " ranks");
  const auto bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  storage_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, bytes, at::DataPtr(nullptr, pool_->device()),
      /*allocator=*/nullptr, /*resizable=*/false));
  hide();
}

void GatherBuffer::begin() {
  TESSERA_INVARIANT(!memory_.defined() && !aliased_.defined(), "a gather began twice");
  memory_ = pool_->take(numel_, dtype_);
}

at::Tensor GatherBuffer::writable_slice() const {
  const auto slice = numel_ / ranks_;
  return memory_.narrow(0, slice * rank_, slice);
}

AllGather GatherBuffer::gather() const { return {memory_}; }

void GatherBuffer::publish() {
  TESSERA_INVARIANT(memory_.defined(), "published before it began");
  show(memory_.data_ptr());
}

void GatherBuffer::end() {
  if (aliased_.defined()) return;
  hide();
  if (memory_.defined()) pool_->give_back(std::move(memory_));
  memory_ = at::Tensor();
}

void GatherBuffer::alias(const at::Tensor& flat) {
  TESSERA_INVARIANT(flat.numel() == numel_ && flat.scalar_type() == dtype_,
                    "alias of another shape");
  aliased_ = flat;
  show(flat.data_ptr());
}

at::Tensor GatherBuffer::view(std::int64_t offset, at::IntArrayRef sizes) const {
  // Built by hand: the operators that make views look at the data pointer, which throws while
  // released.
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype_, c10::kStrided, pool_->device())),
      c10::scalarTypeToTypeMeta(dtype_));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return view;
}

void GatherBuffer::set_released_message(std::string message) {
  released_message_ = std::move(message);
  if (!published_) hide();
}

void GatherBuffer::use_pool(std::shared_ptr<BufferPool> pool) {
  TESSERA_INVARIANT(!memory_.defined(), "a gather buffer changed its pool while it holds memory");
  pool_ = std::move(pool);
}

void GatherBuffer::show(void* data) {
  auto* impl = storage_.unsafeGetStorageImpl();
  impl->clear_data_ptr_access_error_msg_();
  impl->set_data_ptr_noswap(at::DataPtr(data, pool_->device()));
  published_ = true;
}

void GatherBuffer::hide() {
  auto* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, pool_->device()));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(released_message_);
  published_ = false;
}

}  // namespace tessera::comm
