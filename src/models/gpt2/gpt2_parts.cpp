#include "models/gpt2/gpt2_parts.h"

#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "grad/region.h"
#include "nn/linear.h"
#include "parallel/transitions.h"
#include "tessera/wide_scope.h"

namespace tessera::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::ScalarType dtype_inside(const at::Tensor& x) {
  return at::promote_types(x.scalar_type(), at::kFloat);
}

/// Keeps x as it came: what it is widened to is made again.
struct LayerNormFunction : torch::autograd::Function<LayerNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, double eps) {
    const WideScope wide;
    const at::Tensor x = input.contiguous();
    const at::ScalarType inside = dtype_inside(x);
    auto [y, mean, scale] = at::native_layer_norm(x.to(inside), weight.sizes(), weight.to(inside),
                                                  bias.to(inside), eps);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, mean, scale});
    ctx->saved_data["bias_dtype"] = bias.scalar_type();
    return y.to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const WideScope wide;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::ScalarType inside = dtype_inside(x);
    const at::Tensor factor = weight.to(inside);
    const std::array<bool, 3> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                     ctx->needs_input_grad(2)};
    // Of the bias it only wants to know that there is one.
    auto [grad_x, grad_weight, grad_bias] = at::native_layer_norm_backward(
        grads[0].to(inside).contiguous(), x.to(inside), weight.sizes(), saved[2], saved[3], factor,
        /*bias=*/factor, wanted);
    const auto rounded = [](const at::Tensor& grad, at::ScalarType dtype) {
      return grad.defined() ? grad.to(dtype) : grad;
    };
    return {rounded(grad_x, x.scalar_type()), rounded(grad_weight, weight.scalar_type()),
            rounded(grad_bias, ctx->saved_data["bias_dtype"].toScalarType()), at::Tensor()};
  }
};

}  // namespace

LayerNorm::LayerNorm(std::int64_t size, double eps, const ParameterLayout& layout) : eps_(eps) {
  weight = add_parameter("weight", {size}, nn::norm_weight(layout));
  bias = add_parameter("bias", {size}, nn::bias_of_layer(layout));
}

at::Tensor LayerNorm::forward(const at::Tensor& x) {
  return LayerNormFunction::apply(x, weight, bias, eps_);
}

TransposedLinear::TransposedLinear(const Options& options) {
  weight = add_parameter("weight", {options.in, options.out},
                         {.layout = options.weight, .fused = options.fused});
  bias = add_parameter("bias", {options.out}, nn::bias_of_layer(options.bias));
}

at::Tensor TransposedLinear::forward(const at::Tensor& x) {
  return nn::linear(x, weight.t(), bias);
}

at::Tensor TransposedLinear::forward_into(
    const nn::TensorRegion& region, torch::nn::Module& layer, const std::vector<at::Tensor>& inputs,
    std::function<at::Tensor(const std::vector<at::Tensor>&)> inside) {
  if (region.size() == 1) return forward(inside(inputs));
  std::vector<at::Tensor> all = inputs;
  at::Tensor once = parallel::only_first(bias, region.axis());
  // Not the parameter itself, of which a region would not know that it is one.
  if (grad::regions_here() != nullptr) once = once.clone();
  all.push_back(std::move(once));
  const auto addend = [this, inside = std::move(inside)](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{nn::linear(inside(in), weight.t(), in.back())};
  };
  return region.leave(grad::in_region(layer, "", all, addend).front());
}

TransposedLinear::Options column_parallel(const nn::TensorRegion& region, std::int64_t in,
                                          std::int64_t out) {
  return {
      .in = in, .out = region.part_of(out), .weight = region.column(1), .bias = region.column()};
}

TransposedLinear::Options row_parallel(const nn::TensorRegion& region, std::int64_t in,
                                       std::int64_t out) {
  return {.in = region.part_of(in), .out = out, .weight = region.column(), .bias = region.inside()};
}

}  // namespace tessera::models
