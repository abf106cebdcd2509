#include "nn/gated.h"

#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "nn/first_derivative.h"
#include "nn/mlp.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GateAndUp {
  at::Tensor gate, up;
};

/// [..., 2I] -> two of [..., I], views.
GateAndUp interleaved(const at::Tensor& both) {
  const at::Tensor pairs = both.unflatten(-1, {both.size(-1) / 2, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::promote_types(x.scalar_type(), at::kFloat));
}

/// Where there are no kernels: keeps the input alone, not what autograd would keep in fp32.
struct ClampedSwigluFunction : torch::autograd::Function<ClampedSwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& both, double alpha,
                            double limit) {
    const WideScope inside;
    const auto [gate, up] = interleaved(both);
    const at::Tensor g = wide(gate).clamp_max(limit);
    const at::Tensor u = wide(up).clamp(-limit, limit);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({both});
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["limit"] = limit;
    return ((u + 1) * (g * at::sigmoid(g * alpha))).to(both.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const at::Tensor both = ctx->get_saved_variables()[0];
    const double alpha = ctx->saved_data["alpha"].toDouble();
    const double limit = ctx->saved_data["limit"].toDouble();
    const auto [gate_input, up_input] = interleaved(both);
    const at::Tensor gate = wide(gate_input);
    const at::Tensor up = wide(up_input);
    const at::Tensor g = gate.clamp_max(limit);
    const at::Tensor s = at::sigmoid(g * alpha);
    const at::Tensor grad = wide(grads[0]);
    // d(g s) = s + alpha g s (1 - s)
    const at::Tensor slope = s * (1 + g * (1 - s) * alpha);
    const at::Tensor grad_gate = grad * (up.clamp(-limit, limit) + 1) * slope * gate.le(limit);
    const at::Tensor grad_up = grad * g * s * up.abs().le(limit);
    return {at::stack({grad_gate, grad_up}, -1).flatten(-2).to(both.scalar_type()), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor swiglu_halves(const at::Tensor& both) {
  if (cpu::has_kernels(both)) return cpu::swiglu_halves(both);
  const std::int64_t inner = both.size(-1) / 2;
  return swiglu_composite(both.narrow(-1, 0, inner), both.narrow(-1, inner, inner));
}

at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options) {
  if (cpu::has_kernels(both)) return cpu::clamped_swiglu(both, options);
  return ClampedSwigluFunction::apply(both, options.alpha, options.limit);
}

at::Tensor clamped_swiglu_composite(const at::Tensor& both, const ClampedSwiglu& options) {
  const auto [gate, up] = interleaved(both);
  const at::Tensor g = wide(gate).clamp_max(options.limit);
  const at::Tensor u = wide(up).clamp(-options.limit, options.limit);
  return ((u + 1) * (g * at::sigmoid(g * options.alpha))).to(both.scalar_type());
}

}  // namespace tessera::nn
