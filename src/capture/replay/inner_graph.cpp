#include "capture/replay/inner_graph.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unordered_set>
#include <utility>

#include "grad/leaf.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using torch::autograd::variable_list;

/// Keeps the gradient of one input as it comes. At a leaf, autograd would change its layout.
struct InputEnd : torch::autograd::Node {
  at::Tensor gradient;
  bool is_awaited = false;
  variable_list apply(variable_list&& grads) override {
    TESSERA_CHECK(
        is_awaited, ErrorKind::kUsage,
        "compile: found a backward through a tensor that a region's body has left behind, "
        "expected one through its results; return the tensor as one of them, or call "
        "compile(handle, {})");
    gradient = std::move(grads[0]);
    return {};
  }
};

/// While alive, the ends keep what comes.
class Awaited {
 public:
  explicit Awaited(const std::vector<compat::NodePtr>& ends) : ends_(ends) { set(true); }
  ~Awaited() { set(false); }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

 private:
  void set(bool is_awaited) const {
    for (const auto& end : ends_) {
      if (auto* of_input = dynamic_cast<InputEnd*>(end.get())) of_input->is_awaited = is_awaited;
    }
  }
  const std::vector<compat::NodePtr>& ends_;
};

bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || !node.retains_grad_hooks().empty();
}

}  // namespace

void InnerGraph::enter(std::vector<at::Tensor>& inputs) {
  ends_.assign(inputs.size(), nullptr);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    const bool wants = inputs[i].requires_grad();
    inputs[i] = inputs[i].detach();
    if (!wants) continue;
    ends_[i] = compat::make_node<InputEnd>();
    torch::autograd::set_history(inputs[i], ends_[i]);
  }
}

std::vector<at::Tensor> InnerGraph::backward(const std::vector<at::Tensor>& results,
                                             const std::vector<at::Tensor>& gradients) {
  variable_list roots, root_grads;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!gradients.at(i).defined() || !results[i].requires_grad()) continue;
    roots.push_back(results[i]);
    root_grads.push_back(gradients[i]);
  }
  if (!roots.empty()) {
    const Awaited awaited(ends_);
    torch::autograd::backward(roots, root_grads,
                              torch::autograd::get_current_graph_task_keep_graph());
  }
  variable_list of_inputs;
  for (const auto& end : ends_) {
    auto* kept = dynamic_cast<InputEnd*>(end.get());
    of_inputs.push_back(kept == nullptr ? at::Tensor() : std::exchange(kept->gradient, {}));
  }
  return of_inputs;
}

std::string leads_out(const variable_list& results, std::uint64_t begin) {
  std::vector<torch::autograd::Node*> open;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& result : results) {
    if (result.defined()) visit(result.grad_fn().get());
  }
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end == nullptr && has_hooks(*node)) return "a hook on a tensor inside";
    if (dynamic_cast<const InputEnd*>(node) != nullptr) continue;
    if (end != nullptr) {
      const auto known = grad::find_leaf(end->variable);
      if (known == nullptr || known->sink == nullptr) {
        return "a gradient of a tensor that is neither an argument nor a parameter";
      }
    } else if (node->sequence_nr() < begin) {
      return "a tensor from outside that has a history and is no argument";
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return {};
}

}  // namespace tessera::capture
