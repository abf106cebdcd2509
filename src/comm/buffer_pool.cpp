#include "comm/buffer_pool.h"

#include <ATen/ATen.h>

#include "tessera/error.h"

namespace tessera::comm {

at::Tensor BufferPool::take(std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto size = it->numel();
    if (size < bytes || size > bytes + bytes / 2) continue;
    if (best == free_.end() || size < best->numel()) best = it;
  }
  at::Tensor block;
  if (best != free_.end()) {
    block = std::move(*best);
    free_.erase(best);
  } else {
    block = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    total_bytes_ += bytes;
    ++blocks_made_;
  }
  return block.narrow(0, 0, bytes).view(dtype);
}

void BufferPool::give_back(at::Tensor tensor) {
  TESSERA_INVARIANT(tensor.defined(), "an undefined tensor came back to the pool");
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  free_.push_back(at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_))
                      .set_(tensor.storage(), 0, {bytes}, {1}));
}

}  // namespace tessera::comm
