#include "comm/buffer_pool.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kFreedKnown = 64;

}  // namespace

bool FreeBlocks::fits(std::int64_t block, std::int64_t bytes) const {
  return block >= bytes && static_cast<double>(block) <= most_over_ * static_cast<double>(bytes);
}

at::Tensor FreeBlocks::take(std::int64_t bytes) {
  ++requests_;
  const auto none = blocks_.size();
  auto best = none;
  auto too_small = none;  // the largest that the block to be made could stand in for
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto size = blocks_[i].memory.numel();
    if (fits(size, bytes)) {
      // Of one size the one that came back last: those that a step does not need grow idle.
      if (best == none || size <= blocks_[best].memory.numel()) best = i;
    } else if (size < bytes && fits(bytes, size)) {
      if (too_small == none || size > blocks_[too_small].memory.numel()) too_small = i;
    }
  }
  if (best != none) return remove(best);
  const auto early = std::ranges::find_if(
      freed_idle_, [&](const std::int64_t freed) { return fits(freed, bytes); });
  if (early != freed_idle_.end()) {
    freed_idle_.erase(early);
    patience_ *= 2;
  }
  if (too_small != none) free(too_small);
  return {};
}

void FreeBlocks::give_back(at::Tensor block) {
  bytes_ += block.numel();
  blocks_.push_back({std::move(block), requests_});
  if (requests_ - looked_ >= patience_) free_idle();
}

void FreeBlocks::free_idle() {
  looked_ = requests_;
  for (auto i = blocks_.size(); i-- > 0;) {
    if (requests_ - blocks_[i].since < patience_) continue;
    if (freed_idle_.size() == kFreedKnown) freed_idle_.erase(freed_idle_.begin());
    freed_idle_.push_back(blocks_[i].memory.numel());
    free(i);
  }
}

at::Tensor FreeBlocks::remove(std::size_t index) {
  at::Tensor block = std::move(blocks_[index].memory);
  blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
  bytes_ -= block.numel();
  return block;
}

void FreeBlocks::free(std::size_t index) { bytes_freed_ += remove(index).numel(); }

void FreeBlocks::clear() {
  while (!blocks_.empty()) free(blocks_.size() - 1);
}

at::Tensor BufferPool::take(std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  at::Tensor block = free_.take(bytes);
  if (!block.defined()) {
    block = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    made_bytes_ += bytes;
    ++blocks_made_;
  }
  return block.narrow(0, 0, bytes).view(dtype);
}

void BufferPool::give_back(at::Tensor tensor) {
  TESSERA_INVARIANT(tensor.defined(), "an undefined tensor came back to the pool");
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  free_.give_back(at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_))
                      .set_(tensor.storage(), 0, {bytes}, {1}));
}

}  // namespace tessera::comm
