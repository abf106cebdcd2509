// A result that the backward leaves out: what it came from has no gradient, not one of zeros.
// [Note: left-out results]
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "unit/nn/compare.h"

namespace tessera::nn {

/// Two results of one node, as a sharded module has them.
struct TwoResults : torch::autograd::Function<TwoResults> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& first, const at::Tensor& second) {
    context->set_materialize_grads(false);
    return {first.clone(), second.clone()};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return grads;
  }
};

/// Leaves with the values of `inputs`.
inline std::vector<at::Tensor> leaves_of(std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) input = input.detach().clone().requires_grad_(true);
  return inputs;
}

/// A backward that reaches the node of `left_out` without a gradient for it.
inline void backward_around(const at::Tensor& left_out) {
  const at::Tensor used = at::ones({3}).requires_grad_(true);
  TwoResults::apply(used, left_out)[0].sum().backward();
  EXPECT_TRUE(used.grad().equal(at::ones({3})));
}

/// No input of the function has a gradient from a backward that leaves its result out.
inline void expect_left_out(const Function& function, const std::vector<at::Tensor>& inputs,
                            const std::string& what) {
  const std::vector<at::Tensor> leaves = leaves_of(inputs);
  const at::Tensor result = function(leaves);
  ASSERT_TRUE(result.requires_grad()) << what;
  backward_around(result);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_FALSE(leaves[i].grad().defined()) << what << ": input " << i;
  }
}

}  // namespace tessera::nn
