#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::aten {
namespace {

struct GateAndUp {
  at::Tensor gate, up;
};

/// Views of [..., 2I], where the gate comes before up.
GateAndUp side_by_side(const at::Tensor& both) {
  const std::int64_t inner = both.size(-1) / 2;
  return {both.narrow(-1, 0, inner), both.narrow(-1, inner, inner)};
}

/// Views of [..., 2I], where gate and up alternate.
GateAndUp interleaved(const at::Tensor& both) {
  const at::Tensor pairs = both.unflatten(-1, {both.size(-1) / 2, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::promote_types(x.scalar_type(), at::kFloat));
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  const at::Tensor grad_up = (grad * at::silu(gate)).to(up.scalar_type());
  return {at::silu_backward((grad * up).to(gate.scalar_type()), gate), grad_up};
}

at::Tensor swiglu_halves(const at::Tensor& both) {
  const auto [gate, up] = side_by_side(both);
  return aten::swiglu(gate, up);
}

at::Tensor swiglu_halves_backward(const at::Tensor& grad, const at::Tensor& both) {
  const auto [gate, up] = side_by_side(both);
  if (grad.scalar_type() != both.scalar_type()) {
    const auto [grad_gate, grad_up] = aten::swiglu_backward(grad, gate, up);
    return at::cat({grad_gate, grad_up}, -1);
  }
  // The same operations, each with its result in place.
  const at::Tensor result = at::empty_like(both);
  auto [grad_gate, grad_up] = side_by_side(result);
  at::mul_out(grad_up, grad, at::silu(gate));
  at::silu_backward_out(grad_gate, grad * up, gate);
  return result;
}

at::Tensor clamped_swiglu(const at::Tensor& both, double alpha, double limit) {
  const WideScope inside;
  const auto [gate, up] = interleaved(both);
  const at::Tensor g = wide(gate).clamp_max(limit);
  const at::Tensor u = wide(up).clamp(-limit, limit);
  return ((u + 1) * (g * at::sigmoid(g * alpha))).to(both.scalar_type());
}

at::Tensor clamped_swiglu_backward(const at::Tensor& grad_input, const at::Tensor& both,
                                   double alpha, double limit) {
  const auto [gate_input, up_input] = interleaved(both);
  const at::Tensor gate = wide(gate_input);
  const at::Tensor up = wide(up_input);
  const at::Tensor g = gate.clamp_max(limit);
  const at::Tensor s = at::sigmoid(g * alpha);
  const at::Tensor grad = wide(grad_input);
  // d(g s) = s + alpha g s (1 - s)
  const at::Tensor slope = s * (1 + g * (1 - s) * alpha);
  const at::Tensor grad_gate = grad * (up.clamp(-limit, limit) + 1) * slope * gate.le(limit);
  const at::Tensor grad_up = grad * g * s * up.abs().le(limit);
  return at::stack({grad_gate, grad_up}, -1).flatten(-2).to(both.scalar_type());
}

}  // namespace tessera::kernels::aten
