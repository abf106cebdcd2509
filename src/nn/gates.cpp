#include "nn/gates.h"

#include <ATen/ops/clamp_min.h>
#include <ATen/ops/gelu.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({gate, up});
    return kernels::swiglu(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(2);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_gate, grad_up] = kernels::swiglu_backward(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

/// This one and the clamped one keep the input alone.
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

/// Keeps what is not negative of the input.
struct ReluSquaredFunction : torch::autograd::Function<ReluSquaredFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    const at::Tensor kept = at::clamp_min(x, 0);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({kept});
    return kept * kept;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(1);  // [Note: left-out results]
    return {(grads[0] * ctx->get_saved_variables()[0]).mul_(2)};
  }
};

}  // namespace

at::Tensor relu_squared(const at::Tensor& x) {
  return base::has_second_derivatives(x) ? at::clamp_min(x, 0).square()
                                         : ReluSquaredFunction::apply(x);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return base::has_second_derivatives(gate) ? kernels::swiglu(gate, up)
                                            : SwigluFunction::apply(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::gelu(gate, "tanh") * up;
}

at::Tensor swiglu_halves(const at::Tensor& both) {
  return base::has_second_derivatives(both) ? kernels::swiglu_halves(both)
                                            : SwigluHalvesFunction::apply(both);
}

at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options) {
  return ClampedSwigluFunction::apply(both, options.alpha, options.limit);
}

at::Tensor ProductInput::formed() const {
  switch (kind) {
    case Kind::kItself:
      return x;
    case Kind::kSwiglu:
      return swiglu(x, up);
    case Kind::kSwigluHalves:
      return swiglu_halves(x);
  }
  TESSERA_INVARIANT(false, "an input of no kind");
}

bool ProductInput::is_kept_as_gate() const {
  const bool follows = x.requires_grad() || (up.defined() && up.requires_grad());
  const bool one_dtype = !up.defined() || up.scalar_type() == x.scalar_type();
  return kind == Kind::kItself || (follows && one_dtype && !base::has_second_derivatives(x));
}

at::Tensor formed_again(ProductInput::Kind kind, const at::Tensor& x, const at::Tensor& up) {
  switch (kind) {
    case ProductInput::Kind::kItself:
      return x;
    case ProductInput::Kind::kSwiglu:
      return kernels::swiglu(x, up);
    case ProductInput::Kind::kSwigluHalves:
      return kernels::swiglu_halves(x);
  }
  TESSERA_INVARIANT(false, "an input of no kind");
}

std::tuple<at::Tensor, at::Tensor> formed_backward(const at::Tensor& grad, ProductInput::Kind kind,
                                                   const at::Tensor& x, const at::Tensor& up) {
  switch (kind) {
    case ProductInput::Kind::kItself:
      return {grad, at::Tensor()};
    case ProductInput::Kind::kSwiglu:
      return kernels::swiglu_backward(grad, x, up);
    case ProductInput::Kind::kSwigluHalves:
      return {kernels::swiglu_halves_backward(grad, x), at::Tensor()};
  }
  TESSERA_INVARIANT(false, "an input of no kind");
}

}  // namespace tessera::nn
