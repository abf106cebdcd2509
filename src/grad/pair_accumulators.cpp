#include "grad/pair_accumulators.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace tessera::grad {

void PairAccumulators::enter(const std::vector<std::shared_ptr<Leaf>>& leaves) {
  at_enter_.push_back(others_.size());
  for (const auto& leaf : leaves) {
    if (!leaf->tensor.requires_grad()) continue;
    if (std::ranges::find(others_, leaf, &OfOther::leaf) != others_.end()) continue;
    others_.push_back({leaf, torch::autograd::impl::try_get_grad_accumulator(leaf->tensor)});
  }
}

void PairAccumulators::leave() {
  for (auto i = at_enter_.back(); i < others_.size(); ++i) {
    compat::set_grad_accumulator(others_[i].leaf->tensor, others_[i].node);
  }
  others_.resize(at_enter_.back());
  at_enter_.pop_back();
}

void PairAccumulators::exchange() {
  for (auto& [leaf, node] : others_) {
    auto suspended = torch::autograd::impl::try_get_grad_accumulator(leaf->tensor);
    compat::set_grad_accumulator(leaf->tensor, std::exchange(node, std::move(suspended)));
  }
}

}  // namespace tessera::grad
