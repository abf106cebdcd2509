// A product whose kernel forms the weight's gradient wider than the weight.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::test {

/// x * w in bf16; the weight's gradient is formed and returned in fp32.
class WideGradient : public torch::autograd::Function<WideGradient> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], grads[0].to(at::kFloat) * saved[0].to(at::kFloat)};
  }
};

}  // namespace tessera::test
