// Slot: a place in a model that calls its module directly until the module is sharded, then through
// its handle.
//
// Our own models reach their blocks through slots, so that train/parallelize.cpp decides what
// becomes a unit.
#pragma once

#include <memory>
#include <utility>

#include "tessera/shard.h"

namespace tessera::fsdp {

template <class M>
class Slot {
 public:
  Slot() = default;
  explicit Slot(std::shared_ptr<M> module) : module_(std::move(module)) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return handle_ ? handle_->forward(std::forward<Args>(args)...)
                   : module_->forward(std::forward<Args>(args)...);
  }

  /// Turns the module into a unit of its own. The handle is what a parent's fully_shard has to
  /// find: register it in the place of the module.
  const std::shared_ptr<Sharded<M>>& shard(const Mesh& mesh, const PrecisionPolicy& policy,
                                           const ShardOptions& options) {
    handle_ = std::make_shared<Sharded<M>>(module_, mesh, policy, options);
    return handle_;
  }

  const std::shared_ptr<M>& module() const { return module_; }
  const std::shared_ptr<Sharded<M>>& handle() const { return handle_; }

 private:
  std::shared_ptr<M> module_;
  std::shared_ptr<Sharded<M>> handle_;
};

}  // namespace tessera::fsdp
