// All differences between torch 2.11 and 2.13 that the library works around.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#define TESSERA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace tessera::compat {

/// std::shared_ptr<Node> or c10::intrusive_ptr<Node>.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Args>
auto make_node(Args&&... args) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
#else
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
#endif
}

/// Gives later uses of the leaf this AccumulateGrad node, as long as it lives; null: the next use
/// makes a node.
inline void set_grad_accumulator(const at::Tensor& leaf, const NodePtr& node) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  torch::autograd::impl::set_grad_accumulator(leaf,
                                              c10::weak_intrusive_ptr<torch::autograd::Node>(node));
#else
  torch::autograd::impl::set_grad_accumulator(leaf, std::weak_ptr<torch::autograd::Node>(node));
#endif
}
inline void reset_grad_accumulator(const at::Tensor& leaf) {
  set_grad_accumulator(leaf, NodePtr());
}

/// Allows reads of a storage's data again; the data are set next.
#if TESSERA_TORCH_AT_LEAST(2, 13)
inline void clear_access_error(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}
#else
// In these versions the message can be set but not cleared. The flag is private: an explicit
// instantiation may name it.
void clear_flag_of(c10::StorageImpl& storage);
template <bool c10::StorageImpl::* flag>
struct AccessErrorFlag {
  friend void clear_flag_of(c10::StorageImpl& storage) { storage.*flag = false; }
};
template struct AccessErrorFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
inline void clear_access_error(c10::StorageImpl& storage) { clear_flag_of(storage); }
#endif

/// Bytes of the whole device. 2.11's allocators may not know.
inline std::optional<std::int64_t> memory_size([[maybe_unused]] c10::DeviceAllocator& allocator,
                                               [[maybe_unused]] c10::DeviceIndex index) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  return static_cast<std::int64_t>(allocator.getMemoryInfo(index).second);
#else
  return std::nullopt;
#endif
}

}  // namespace tessera::compat
