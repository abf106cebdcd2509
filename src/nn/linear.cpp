#include "nn/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/keep.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a call says beside its tensors.
struct LinearCall {
  at::ScalarType compute;
  WeightGradient when;
};

/// One node a layer, plain products of 2-D views, nothing computed for what needs no gradient.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const LinearCall& call) {
    const at::ScalarType compute = call.compute;
    weight.const_data_ptr();    // a parameter without data says so here, not from inside a product
    const WideScope own_dtype;  // the result has the input's
    std::vector<std::int64_t> shape = input.sizes().vec();
    const std::int64_t rows = c10::multiply_integers(shape.begin(), shape.end() - 1);
    const at::Tensor x = input.reshape({rows, weight.size(1)}).to(compute);
    const at::Tensor y = keep({rows, weight.size(0)}, [&] {
      const at::Tensor matrix = weight.to(compute).t();
      return bias ? at::addmm(bias->to(compute), x, matrix) : at::mm(x, matrix);
    });
    ctx->set_materialize_grads(false);
    // A frozen weight has no use for its input.
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    ctx->saved_data["compute"] = compute;
    ctx->saved_data["at_once"] = call.when == WeightGradient::kAtOnce;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["input_dtype"] = input.scalar_type();
    ctx->saved_data["input_shape"] = input.sizes();
    shape.back() = weight.size(0);
    return y.to(input.scalar_type()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto shape = grads[0].sizes();
    const std::int64_t rows = c10::multiply_integers(shape.begin(), shape.end() - 1);
    const at::ScalarType compute = ctx->saved_data["compute"].toScalarType();
    const at::Tensor grad = grads[0].reshape({rows, weight.size(0)}).to(compute);
    variable_list result(4);
    if (ctx->needs_input_grad(0)) {
      result[0] = at::mm(grad, weight.to(compute))
                      .to(ctx->saved_data["input_dtype"].toScalarType())
                      .view(ctx->saved_data["input_shape"].toIntVector());
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = weight_gradient(
          weight, [grad, x] { return at::mm(grad.t(), x); },
          ctx->saved_data["at_once"].toBool() ? WeightGradient::kAtOnce : WeightGradient::kMayWait);
    }
    // Edges are counted over tensors: there is none for a bias that is not there. Its sum is too
    // small to be put off.
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) result[2] = grad.sum(0);
    return result;
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  std::optional<at::ScalarType> compute, WeightGradient when) {
  return LinearFunction::apply(x, weight, bias.defined() ? std::make_optional(bias) : std::nullopt,
                               LinearCall{compute.value_or(weight.scalar_type()), when});
}

LinearPlacement column_parallel(const TensorRegion& region) {
  return {region.column(), region.column(), region.inside(), region.column()};
}

// An adapter's first product is an addend then; the second is linear in it, so it stays one.
LinearPlacement row_parallel(const TensorRegion& region) {
  return {region.row(), region.inside(), region.row(), region.inside()};
}

LinearPlacement inside(const TensorRegion& region) {
  return {region.inside(), region.inside(), region.inside(), region.inside()};
}

LinearPlacement by_heads(const TensorRegion& region, std::int64_t heads) {
  return {region.heads(heads), region.heads(heads), region.inside(), region.heads(heads)};
}

Linear::Linear(std::int64_t in_features, std::int64_t out_features, Bias with_bias,
               LinearPlacement placement)
    : placement_(std::move(placement)) {
  weight = add_parameter("weight", {out_features, in_features}, {.layout = placement_.weight});
  if (with_bias == Bias::kYes) {
    bias = add_parameter("bias", {out_features}, bias_of_layer(placement_.bias));
  }
}

at::Tensor Linear::with_adapter(const at::Tensor& y, const at::Tensor& x) const {
  return lora_a_ ? nn::add_adapter(y, x, lora_a_->weight, lora_b_->weight, lora_) : y;
}

at::Tensor Linear::forward(const at::Tensor& x) {
  return with_adapter(linear(x, weight, bias, std::nullopt, when_), x);
}

at::Tensor Linear::forward_into(const TensorRegion& region, const at::Tensor& x) {
  if (region.size() == 1) return forward(x);
  // One rank's addend has the bias: it is in the sum once, and rounded with it.
  const at::Tensor once = bias.defined() ? parallel::only_first(bias, region.axis()) : bias;
  return region.leave(with_adapter(nn::linear(x, weight, once, std::nullopt, when_), x));
}

void Linear::declare_all(const ParameterLayout& layout) {
  placement_ = {layout, layout, layout, layout};
  PlacedModule::declare_all(layout);
}

void Linear::add_adapter(const LoraOptions& options) {
  TESSERA_INVARIANT(!lora_a_, "a second adapter of ", options.layer);
  lora_ = options;
  lora_a_ =
      register_module("lora_A", std::make_shared<Linear>(weight.size(1), options.rank, Bias::kNo,
                                                         LinearPlacement{placement_.lora_a}));
  lora_b_ =
      register_module("lora_B", std::make_shared<Linear>(options.rank, weight.size(0), Bias::kNo,
                                                         LinearPlacement{placement_.lora_b}));
  // As peft's kaiming_uniform with a = sqrt(5); at first the layer is what it was.
  lora_a_->begin_with("weight", InitKind::kUniform);
  lora_b_->begin_with("weight", InitKind::kZeros);
}

std::shared_ptr<Linear> add_projection(torch::nn::Module& parent, const std::string& name,
                                       const Projection& projection) {
  auto linear =
      std::make_shared<Linear>(projection.in, projection.out, Bias::kNo, projection.placement);
  if (projection.weight_name == WeightName::kOwn) return parent.register_module(name, linear);
  const auto outer = parent.register_module(name, std::make_shared<torch::nn::Module>());
  return outer->register_module("linear", linear);
}

}  // namespace tessera::nn
