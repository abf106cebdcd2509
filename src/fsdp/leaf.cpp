#include "fsdp/leaf.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "comm/torch_compat.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

/// Returning an undefined gradient makes AccumulateGrad do nothing: no copy, no `.grad`.
class LeafHook : public FunctionPreHook {
 public:
  explicit LeafHook(std::shared_ptr<Leaf> leaf) : leaf_(std::move(leaf)) {}

  variable_list operator()(const variable_list& grads) override {
    TESSERA_CHECK(
        leaf_->sink != nullptr, ErrorKind::kContract, "gradient of ", leaf_->name,
        ": found one after the handle of its module is gone, expected none; keep the handle");
    leaf_->sink->accept(leaf_->slot, grads.at(0), grad::Source::kEager);
    return {at::Tensor()};
  }

  const std::shared_ptr<Leaf>& leaf() const { return leaf_; }

 private:
  std::shared_ptr<Leaf> leaf_;
};

/// A `.grad` for optimizers and clips that were given the wrong tensors.
at::Tensor poisoned_like(const at::Tensor& leaf, const std::string& name) {
  auto tensor = at::empty({0}, leaf.options().requires_grad(false));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(leaf.sizes());
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      concat("gradient of the unsharded parameter ", name,
             ": found an access, expected none; gradients are on the handle's shards: give "
             "handle.parameters() to the optimizer and to the clip"));
  return tensor;
}

}  // namespace

void install(const std::shared_ptr<Leaf>& leaf, bool trainable) {
  torch::autograd::impl::add_hook(leaf->tensor, std::make_unique<LeafHook>(leaf));
  set_trainable(*leaf, trainable);
}

void set_trainable(const Leaf& leaf, bool trainable) {
  const auto& tensor = leaf.tensor;
  tensor.mutable_grad().reset();
  tensor.set_requires_grad(trainable);
  if (!trainable) return;
  tensor.set_grad_dtype(std::nullopt);
  tensor.mutable_grad() = poisoned_like(tensor, leaf.name);
}

void renew_accumulator(const Leaf& leaf) { compat::reset_grad_accumulator(leaf.tensor); }

bool has_hooks(const at::Tensor& tensor) {
  namespace impl = torch::autograd::impl;
  if (impl::get_autograd_meta(tensor) == nullptr) return false;
  if (!impl::hooks(tensor).empty() || impl::post_acc_grad_hooks(tensor) != nullptr) return true;
  const auto node = impl::try_get_grad_accumulator(tensor);
  return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
}

std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor) {
  if (torch::autograd::impl::get_autograd_meta(tensor) == nullptr) return nullptr;
  for (const auto& hook : torch::autograd::impl::hooks(tensor)) {
    if (const auto* ours = dynamic_cast<const LeafHook*>(hook.get())) return ours->leaf();
  }
  return nullptr;
}

}  // namespace tessera::fsdp
