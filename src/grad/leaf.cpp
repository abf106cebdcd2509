#include "grad/leaf.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

#include "comm/torch_compat.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

/// Returns how many edges of the present graph lead to the leaf's node. One walk for each graph
/// task counts the edges of all leaves.
int edges_into(const torch::autograd::Node* leaf) {
  struct Counted {
    int task = -1;
    std::unordered_map<const torch::autograd::Node*, int> edges;
  };
  thread_local Counted counted;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return 0;
  if (const auto task = torch::autograd::get_current_graph_task_id(); counted.task != task) {
    counted = {task, {}};
    for (const auto* node : *nodes) {
      for (const auto& edge : node->next_edges()) {
        if (edge.function && edge.function->num_outputs() == 0)
          ++counted.edges[edge.function.get()];
      }
    }
  }
  const auto found = counted.edges.find(leaf);
  return found == counted.edges.end() ? 0 : found->second;
}

/// Completes the contract in the first backward: how often a forward uses a tensor is not known
/// before it has run. It matters where a sum of autograd is narrower than the slot.
void count_uses(Leaf& leaf) {
  auto& contract = *leaf.contract;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf.tensor);
  const int uses = represents(contract.compute.dtype, contract.accumulate) || contract.grad ||
                           contract.raw_sum_by_autograd
                       ? 1
                       : edges_into(node.get());
  if (uses == 0) return;  // the leaf is of another forward
  leaf.uses_counted = true;
  if (uses == 1) return;
  contract.reason(ContractField::kGrad) += concat(", as of ", uses, " in the first backward");
}

/// Returning an undefined gradient makes AccumulateGrad do nothing: no copy, no `.grad`.
class LeafHook : public FunctionPreHook {
 public:
  explicit LeafHook(std::shared_ptr<Leaf> leaf) : leaf_(std::move(leaf)) {}

  variable_list operator()(const variable_list& grads) override {
    TESSERA_CHECK(
        leaf_->sink != nullptr, ErrorKind::kContract, "gradient of ", leaf_->name,
        ": found one after the handle of its module is gone, expected none; keep the handle");
    if (!leaf_->uses_counted && leaf_->contract != nullptr) count_uses(*leaf_);
    leaf_->sink->accept(leaf_->slot, grads.at(0), Source::kEager);
    return {at::Tensor()};
  }

  const std::shared_ptr<Leaf>& leaf() const { return leaf_; }

 private:
  std::shared_ptr<Leaf> leaf_;
};

/// Makes a `.grad` that throws, for optimizers and clips that were given the wrong tensors.
at::Tensor poisoned_like(const at::Tensor& leaf, const std::string& name) {
  auto tensor = at::empty({0}, leaf.options().requires_grad(false));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(leaf.sizes());
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      concat("gradient of the unsharded parameter ", name,
             ": found an access, expected none; gradients are on the shards: give "
             "parameters() of what fully_shard returned to the optimizer and to the clip, and "
             "register no hook on the module's tensors"));
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

bool arrives_alone(const Leaf& leaf) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || !chosen->empty()) return false;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || !node->post_hooks().empty()) return false;
  for (const auto& edge : node->next_edges()) {
    if (!edge.is_valid() || edge.function->num_outputs() != 0) continue;
    for (const auto& hook : edge.function->tensor_pre_hooks()) {
      const auto* ours = dynamic_cast<const LeafHook*>(hook.get());
      if (ours == nullptr || ours->leaf().get() != &leaf) continue;
      // Its AccumulateGrad node belongs to this forward alone, and only the edges to it hold it.
      return edge.function.use_count() == 1 && edge.function->tensor_pre_hooks().size() == 1 &&
             edge.function->pre_hooks().empty() && edge.function->post_hooks().empty();
    }
  }
  return false;
}

std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor) {
  if (torch::autograd::impl::get_autograd_meta(tensor) == nullptr) return nullptr;
  for (const auto& hook : torch::autograd::impl::hooks(tensor)) {
    if (const auto* ours = dynamic_cast<const LeafHook*>(hook.get())) return ours->leaf();
  }
  return nullptr;
}

}  // namespace tessera::grad
