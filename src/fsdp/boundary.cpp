#include "fsdp/boundary.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "comm/torch_compat.h"

namespace tessera::fsdp {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class Boundary : public Node {
 public:
  enum class Side { kBeforeBackward, kAfterBackward };
  Boundary(std::shared_ptr<Entry> entry, Side side) : entry_(std::move(entry)), side_(side) {}

  variable_list apply(variable_list&& grads) override {
    if (side_ == Side::kBeforeBackward) {
      entry_->runtime->pre_backward(*entry_);
    } else {
      entry_->runtime->post_backward(*entry_);
    }
    return std::move(grads);
  }

  std::string name() const override {
    return side_ == Side::kBeforeBackward ? "TesseraPreBackward" : "TesseraPostBackward";
  }

 private:
  std::shared_ptr<Entry> entry_;
  Side side_;
};

bool wrap(const std::vector<at::Tensor*>& tensors, const std::shared_ptr<Entry>& entry,
          Boundary::Side side) {
  std::vector<at::Tensor*> wrapped;
  torch::autograd::edge_list edges;
  for (auto* tensor : tensors) {
    if (!tensor->defined() || !tensor->requires_grad()) continue;
    wrapped.push_back(tensor);
    edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  }
  if (wrapped.empty()) return false;
  auto node = compat::make_node<Boundary>(entry, side);
  node->set_next_edges(std::move(edges));
  for (auto* tensor : wrapped) {
    auto alias = tensor->detach();  // shares storage and version counter
    torch::autograd::set_history(alias, node);
    *tensor = std::move(alias);
  }
  return true;
}

}  // namespace

bool mark_inputs(const std::vector<at::Tensor*>& inputs, const std::shared_ptr<Entry>& entry) {
  return wrap(inputs, entry, Boundary::Side::kAfterBackward);
}

bool mark_outputs(const std::vector<at::Tensor*>& outputs, const std::shared_ptr<Entry>& entry) {
  return wrap(outputs, entry, Boundary::Side::kBeforeBackward);
}

}  // namespace tessera::fsdp
