#include "nn/gated.h"

#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Both keep the input alone.
struct SwigluHalvesFunction : torch::autograd::Function<SwigluHalvesFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input) {
    const at::Tensor both = input.contiguous();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({both});
    return kernels::swiglu_halves(both);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(1);  // [Note: left-out results]
    return {kernels::swiglu_halves_backward(grads[0], ctx->get_saved_variables()[0])};
  }
};

struct ClampedSwigluFunction : torch::autograd::Function<ClampedSwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, double alpha,
                            double limit) {
    const at::Tensor both = input.contiguous();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({both});
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["limit"] = limit;
    return kernels::clamped_swiglu(both, alpha, limit);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    return {kernels::clamped_swiglu_backward(grads[0], ctx->get_saved_variables()[0],
                                             ctx->saved_data["alpha"].toDouble(),
                                             ctx->saved_data["limit"].toDouble()),
            at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor swiglu_halves(const at::Tensor& both) {
  return base::has_second_derivatives(both) ? kernels::swiglu_halves(both)
                                            : SwigluHalvesFunction::apply(both);
}

at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options) {
  return ClampedSwigluFunction::apply(both, options.alpha, options.limit);
}

}  // namespace tessera::nn
