#include "comm/buffer_pool.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "base/threads/shapes_only.h"
#include "comm/torch_compat.h"
#include "dry/allocator.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kFreedKnown = 64;
constexpr std::size_t kEventsKept = 64;
constexpr std::size_t kTakenKnown = std::size_t{1} << 16;

}  // namespace

FreeBlocks::~FreeBlocks() {
  try {
    clear();
  } catch (...) {
    // The device no longer answers: its memory is lost with it.
  }
}

bool FreeBlocks::fits(std::int64_t block, std::int64_t bytes) const {
  return block >= bytes && static_cast<double>(block) <= most_over_ * static_cast<double>(bytes);
}

/// Returns the index of the free block at `memory` that fits; blocks_.size() where there is none.
std::size_t FreeBlocks::index_of(const void* memory, std::int64_t bytes) const {
  std::size_t i = 0;
  while (i < blocks_.size() &&
         (blocks_[i].block.memory.const_data_ptr() != memory || !fits(blocks_[i].bytes(), bytes))) {
    ++i;
  }
  return i;
}

FreeBlocks::Block FreeBlocks::take(std::int64_t bytes, const void* wanted) {
  ++requests_;
  const auto none = blocks_.size();
  if (wanted != nullptr) {
    if (const auto index = index_of(wanted, bytes); index != none) return remove(index);
  }
  auto best = none;
  auto too_small = none;  // the largest that the new block could replace
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto size = blocks_[i].bytes();
    if (fits(size, bytes)) {
      // Among blocks of one size it takes the one that was returned last, so blocks that a step
      // does not need stay idle.
      if (best == none || size <= blocks_[best].bytes()) best = i;
    } else if (size < bytes && fits(bytes, size)) {
      if (too_small == none || size > blocks_[too_small].bytes()) too_small = i;
    }
  }
  if (best != none) {
    if (allocator_) bring_the_first(best);
    return remove(best);
  }
  const auto early = std::ranges::find_if(
      freed_idle_, [&](const std::int64_t freed) { return fits(freed, bytes); });
  if (early != freed_idle_.end()) {
    freed_idle_.erase(early);
    patience_ *= 2;
  }
  if (too_small != none) free(too_small);
  return {};
}

/// Moves the block of that size that was returned first to `index`; the others keep their order.
/// Their times stay in place, so the same number of blocks becomes idle as if the last one were
/// taken.
void FreeBlocks::bring_the_first(std::size_t index) {
  for (auto i = index; i-- > 0;) {
    if (blocks_[i].bytes() == blocks_[index].bytes()) {
      std::swap(blocks_[i].block, blocks_[index].block);
    }
  }
}

void FreeBlocks::recycle(Block block) {
  bytes_ += block.memory.numel();
  blocks_.push_back({std::move(block), requests_});
  if (requests_ - looked_ >= patience_) free_idle();
}

void FreeBlocks::free_idle() {
  looked_ = requests_;
  for (auto i = blocks_.size(); i-- > 0;) {
    if (requests_ - blocks_[i].since < patience_) continue;
    if (freed_idle_.size() == kFreedKnown) freed_idle_.erase(freed_idle_.begin());
    freed_idle_.push_back(blocks_[i].bytes());
    free(i);
  }
}

FreeBlocks::Block FreeBlocks::remove(std::size_t index) {
  Block block = std::move(blocks_[index].block);
  blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
  bytes_ -= block.memory.numel();
  return block;
}

void FreeBlocks::free(std::size_t index) {
  const Block block = remove(index);
  bytes_freed_ += block.memory.numel();
  block.used.block(allocator_, EventSite::kPoolFree);
}

void FreeBlocks::clear_idle_since(std::uint64_t requests) {
  for (auto i = blocks_.size(); i-- > 0;) {
    if (blocks_[i].since <= requests) free(i);
  }
}

void FreeBlocks::clear() {
  while (!blocks_.empty()) free(blocks_.size() - 1);
}

at::Tensor BufferPool::take(std::int64_t numel, at::ScalarType dtype, const Stream& on) {
  const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  const auto number = step_.size();
  // On a device no address is kept: the block that was returned first is taken first.
  const bool comes_again =
      !allocator_ && number < last_step_.size() && last_step_[number].bytes == bytes;
  FreeBlocks::Block block = free_.take(bytes, comes_again ? last_step_[number].memory : nullptr);
  if (!block.memory.defined()) {
    block.memory = make(bytes, on);
  } else if (on) {
    block.used.block(on, EventSite::kPoolBack);
    if (events_.size() < kEventsKept) events_.push_back(std::move(block.used));
  }
  if (has_steps_ && number < kTakenKnown) {
    step_.push_back({bytes, block.memory.const_data_ptr()});
  }
  return block.memory.narrow(0, 0, bytes).view(dtype);
}

void BufferPool::begin_step() {
  last_step_ = std::exchange(step_, {});
  has_steps_ = true;
}

at::Tensor BufferPool::make(std::int64_t bytes, const Stream& on) {
  const StreamScope here(allocator_);
  const dry::FakeMemoryScope block(base::shapes_only());
  const auto fresh = [&] {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  };
  at::Tensor memory;
  try {
    memory = fresh();
  } catch (const c10::OutOfMemoryError&) {
    // The pool's free blocks, of sizes that are not requested now, are the device's memory, too.
    if (free_.bytes() == 0) throw;
    free_.clear();
    memory = fresh();
  }
  made_bytes_ += bytes;
  ++blocks_made_;
  if (on) {
    Event made;
    made.record(allocator_, EventSite::kPoolMade);
    made.block(on, EventSite::kPoolMade);
  }
  return memory;
}

Event BufferPool::used_here() {
  Event used;
  if (!events_.empty()) {
    used = std::move(events_.back());
    events_.pop_back();
  }
  used.record(Stream::current(device_), EventSite::kPoolBack);
  return used;
}

void BufferPool::recycle(at::Tensor tensor, Event used) {
  TESSERA_INVARIANT(tensor.defined(), "an undefined tensor came back to the pool");
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  free_.recycle({at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_))
                     .set_(tensor.storage(), 0, {bytes}, {1}),
                 std::move(used)});
}

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

GatherBuffer::~GatherBuffer() {
  hide();
  try {
    // If it were freed directly, the allocator would not be ordered after the streams that use it.
    if (memory_.defined() && !memory_.is_cpu()) pool_->recycle(std::move(memory_));
  } catch (const std::exception&) {
    // The device no longer answers: its memory is lost with it.
  }
}

void GatherBuffer::begin(const Stream& on) {
  TESSERA_INVARIANT(!memory_.defined() && !aliased_.defined(), "a gather began twice");
  memory_ = pool_->take(numel_, dtype_, on);
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
  if (memory_.defined()) pool_->recycle(std::move(memory_));
  memory_ = at::Tensor();
}

void GatherBuffer::alias(const at::Tensor& flat) {
  TESSERA_INVARIANT(flat.numel() == numel_ && flat.scalar_type() == dtype_,
                    "alias of another shape");
  aliased_ = flat;
  show(flat.data_ptr());
}

at::Tensor GatherBuffer::view(std::int64_t offset, at::IntArrayRef sizes) const {
  // Made without operators: those that make views access the data pointer, which throws while the
  // memory is released.
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
  compat::clear_access_error(*impl);
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
