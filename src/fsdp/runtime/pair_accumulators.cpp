#include "fsdp/runtime/pair_accumulators.h"

#include <algorithm>
#include <utility>

#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {

void PairAccumulators::enter(const Unit& unit) {
  at_enter_.push_back(others_.size());
  const auto keep = [&](const std::shared_ptr<Leaf>& leaf) {
    if (!leaf->owner->contract.trainable) return;
    if (std::ranges::find(others_, leaf, &OfOther::leaf) != others_.end()) return;
    others_.push_back({leaf, torch::autograd::impl::try_get_grad_accumulator(leaf->tensor)});
  };
  for (const auto& parameter : unit.parameters()) std::ranges::for_each(parameter->leaves, keep);
  std::ranges::for_each(unit.borrowed, keep);
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

}  // namespace tessera::fsdp
