#include "nn/rms_norm.h"

#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            double eps, bool rounds_first) {
    const at::Tensor x = input.contiguous();
    auto [y, scale] = kernels::rms_norm(x, weight, eps, rounds_first);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, scale});
    ctx->saved_data["rounds_first"] = rounds_first;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_x, grad_weight] =
        kernels::rms_norm_backward(grads[0], std::nullopt, saved[0], saved[1], saved[2],
                                   ctx->saved_data["rounds_first"].toBool());
    return {grad_x, grad_weight, at::Tensor(), at::Tensor()};
  }
};

struct AddRmsNormFunction : torch::autograd::Function<AddRmsNormFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& residual, const at::Tensor& weight, double eps,
                               bool rounds_first) {
    auto [sum, y, scale] = kernels::add_rms_norm(x, residual, weight, eps, rounds_first);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({sum, weight, scale});
    ctx->saved_data["rounds_first"] = rounds_first;
    return {sum, y};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const at::Tensor none;
    // [Note: left-out results] Without a gradient of the norm its weight gets none, and the sum's
    // goes on as it is.
    if (!grads[1].defined()) return {grads[0], grads[0], none, none, none};
    const variable_list saved = ctx->get_saved_variables();
    const std::optional<at::Tensor> grad_sum =
        grads[0].defined() ? std::optional(grads[0]) : std::nullopt;
    auto [grad_x, grad_weight] = kernels::rms_norm_backward(
        grads[1], grad_sum, saved[0], saved[1], saved[2], ctx->saved_data["rounds_first"].toBool());
    return {grad_x, grad_x, grad_weight, none, none};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormRounding rounding) {
  const bool rounds_first = rounding == NormRounding::kBeforeWeight;
  if (base::has_second_derivatives(x)) {
    return std::get<0>(kernels::rms_norm(x, weight, eps, rounds_first));
  }
  return RmsNormFunction::apply(x, weight, eps, rounds_first);
}

at::Tensor plain_rms_norm(const at::Tensor& x, double eps) {
  // A product with 1 changes no bit.
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  return rms_norm(x, at::ones({x.size(-1)}, x.options().dtype(inside)), eps, NormRounding::kOnce);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps, NormRounding rounding) {
  const bool rounds_first = rounding == NormRounding::kBeforeWeight;
  if (base::has_second_derivatives(x)) {
    auto [sum, y, scale] = kernels::add_rms_norm(x, residual, weight, eps, rounds_first);
    return {sum, y};
  }
  const variable_list result = AddRmsNormFunction::apply(x, residual, weight, eps, rounds_first);
  return {result[0], result[1]};
}

RmsNorm::RmsNorm(std::int64_t size, double eps, NormRounding rounding, ParameterLayout layout)
    : eps_(eps), rounding_(rounding) {
  weight = add_parameter("weight", {size}, norm_weight(std::move(layout)));
}

at::Tensor RmsNorm::forward(const at::Tensor& x) { return rms_norm(x, weight, eps_, rounding_); }

SumAndNorm RmsNorm::add_forward(const at::Tensor& x, const at::Tensor& residual) {
  return add_rms_norm(x, residual, weight, eps_, rounding_);
}

}  // namespace tessera::nn
