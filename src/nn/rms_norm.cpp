#include "nn/rms_norm.h"

#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "nn/wide_dtype.h"
#include "parallel/collectives.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

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
    auto [grad_x, grad_weight] = kernels::rms_norm_backward(
        grads[0], std::nullopt, saved[0], saved[1], saved[2],
        ctx->saved_data["rounds_first"].toBool(), ctx->needs_input_grad(1));
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
    // gradient passes unchanged.
    if (!grads[1].defined()) return {grads[0], grads[0], none, none, none};
    const variable_list saved = ctx->get_saved_variables();
    const std::optional<at::Tensor> grad_sum =
        grads[0].defined() ? std::optional(grads[0]) : std::nullopt;
    auto [grad_x, grad_weight] = kernels::rms_norm_backward(
        grads[1], grad_sum, saved[0], saved[1], saved[2], ctx->saved_data["rounds_first"].toBool(),
        ctx->needs_input_grad(2));
    return {grad_x, grad_x, grad_weight, none, none};
  }
};

/// Sums of a row over the columns of every rank, in the dtype they are formed in.
at::Tensor sum_over_ranks(const at::Tensor& terms, const parallel::Axis& axis,
                          parallel::Direction direction) {
  parallel::Axis exact = axis;
  exact.reduce = std::nullopt;  // of activations' addends; a mean of squares is none
  return parallel::exchange_sum(terms.sum(-1, /*keepdim=*/true), exact, std::nullopt, "shared norm",
                                direction);
}

struct SharedRmsNormFunction : torch::autograd::Function<SharedRmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            double eps, const parallel::Axis& axis) {
    const WideScope inside;
    const at::Tensor x = input.contiguous();
    const at::Tensor wide = x.to(wide_dtype(x));
    const auto columns = static_cast<double>(x.size(-1) * axis.size);
    const at::Tensor scale = sum_over_ranks(wide.square(), axis, parallel::Direction::kForward)
                                 .div_(columns)
                                 .add_(eps)
                                 .rsqrt_();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, scale});
    ctx->saved_data["axis"] = c10::IValue::make_capsule(c10::make_intrusive<AxisOfNorm>(axis));
    return (wide * scale).mul_(weight).to(x.scalar_type());
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    // Every rank takes part in the sum, or none: graphs are the same on all.
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const WideScope inside;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &weight = saved[1], &scale = saved[2];
    const auto held =
        c10::static_intrusive_pointer_cast<AxisOfNorm>(ctx->saved_data["axis"].toCapsule());
    const at::Tensor normed = saved[0].to(scale.scalar_type()) * scale;
    const at::Tensor grad = grads[0].to(scale.scalar_type());
    const auto columns = static_cast<double>(normed.size(-1) * held->axis.size);
    const at::Tensor grad_normed = grad * weight;
    const at::Tensor along =
        sum_over_ranks(grad_normed * normed, held->axis, parallel::Direction::kBackward)
            .div_(columns);
    const at::Tensor grad_x = (grad_normed - normed * along).mul_(scale);
    variable_list result(4);
    result[0] = grad_x.to(saved[0].scalar_type());
    if (ctx->needs_input_grad(1)) {
      result[1] = (grad * normed).reshape({-1, normed.size(-1)}).sum(0);
    }
    return result;
  }
  struct AxisOfNorm : torch::CustomClassHolder {
    explicit AxisOfNorm(parallel::Axis of) : axis(std::move(of)) {}
    const parallel::Axis axis;
  };
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

at::Tensor shared_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                           const parallel::Axis& axis) {
  if (axis.alone()) return rms_norm(x, weight, eps, NormRounding::kOnce);
  return SharedRmsNormFunction::apply(x, weight, eps, axis);
}

at::Tensor plain_rms_norm(const at::Tensor& x, double eps) {
  // A product with 1 changes no bit.
  const at::ScalarType inside = wide_dtype(x);
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

RmsNorm::RmsNorm(std::int64_t size, double eps, NormRounding rounding, ParameterLayout layout,
                 NormFactor factor)
    : eps_(eps), rounding_(rounding), factor_(factor) {
  weight = add_parameter("weight", {size}, norm_weight(std::move(layout)));
  if (factor == NormFactor::kOnePlusWeight) begin_with("weight", InitKind::kZeros);
}

at::Tensor RmsNorm::factor() const {
  if (factor_ == NormFactor::kWeight) return weight;
  const WideScope inside;
  return weight.to(wide_dtype(weight)) + 1.0;
}

at::Tensor RmsNorm::forward(const at::Tensor& x) { return rms_norm(x, factor(), eps_, rounding_); }

at::Tensor RmsNorm::forward_shared(const at::Tensor& x, const parallel::Axis& axis) {
  if (axis.alone()) return forward(x);
  TESSERA_INVARIANT(rounding_ == NormRounding::kOnce, "a shared norm that rounds twice");
  return shared_rms_norm(x, factor(), eps_, axis);
}

SumAndNorm RmsNorm::add_forward(const at::Tensor& x, const at::Tensor& residual) {
  return add_rms_norm(x, residual, factor(), eps_, rounding_);
}

}  // namespace tessera::nn
