// Nodes of an autograd graph, as far as they live.
//
// Where an exception ends a backward, nodes go in whichever device's thread holds them last, while
// the rank's thread may look for others of the same forward. Next: runtime.h.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera::fsdp {

/// Threads: any.
class LivingNodes {
 public:
  using Node = torch::autograd::Node;
  void add(const Node* node) {
    const std::lock_guard lock(mutex_);
    nodes_.push_back(node);
  }
  void remove(const Node* node) {
    const std::lock_guard lock(mutex_);
    std::erase(nodes_, node);
  }
  /// Whether `holds(node)` is true of one; none of them goes in the meantime.
  template <class Holds>
  bool any(const Holds& holds) const {
    const std::lock_guard lock(mutex_);
    return std::any_of(nodes_.begin(), nodes_.end(), holds);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<const Node*> nodes_;
};

}  // namespace tessera::fsdp
