#include "nn/soft_cap.h"

#include <ATen/ops/div.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SoftCapFunction : torch::autograd::Function<SoftCapFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& z, double cap) {
    at::Tensor capped = at::div(z, cap).tanh_().mul_(cap);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({capped});
    ctx->saved_data["cap"] = cap;
    return capped;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(2);  // [Note: left-out results]
    const at::Tensor capped = ctx->get_saved_variables()[0];
    // d tanh(u) = 1 - tanh(u)^2
    at::Tensor slope = at::div(capped, ctx->saved_data["cap"].toDouble());
    slope.square_().neg_().add_(1.0).mul_(grads[0]);
    return {slope, at::Tensor()};
  }
};

}  // namespace

at::Tensor soft_cap(const at::Tensor& z, double cap) { return SoftCapFunction::apply(z, cap); }

}  // namespace tessera::nn
