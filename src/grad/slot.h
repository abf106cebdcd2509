// Slot: a place in a model that calls its module directly until the module is sharded, and then
// through the module's handle.
//
// Tessera's models call their blocks through slots, so that train/parallelize.cpp decides which
// blocks become units, and the calling code does not depend on sharding.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "tessera/forward_signature.h"

namespace tessera::grad {

template <class M>
class Slot {
 public:
  Slot() = default;
  explicit Slot(std::shared_ptr<M> module) : module_(std::move(module)) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return forward_ ? forward_(std::forward<Args>(args)...)
                    : module_->forward(std::forward<Args>(args)...);
  }

  /// Makes calls go to the handle's forward from now on, which has the module's signature. The
  /// fully_shard of a parent has to find the handle: register it in the place of the module.
  template <class Handle>
  void call_through(std::shared_ptr<Handle> handle) {
    forward_ = [handle = std::move(handle)](auto&&... args) {
      return handle->forward(std::forward<decltype(args)>(args)...);
    };
  }

  const std::shared_ptr<M>& module() const { return module_; }

 private:
  std::shared_ptr<M> module_;
  std::function<typename ForwardSignature<M>::type> forward_;  ///< empty until it is sharded
};

}  // namespace tessera::grad
