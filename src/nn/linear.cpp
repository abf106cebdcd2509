#include "nn/linear.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "base/random.h"
#include "base/threads/product.h"
#include "grad/region.h"
#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/keep.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The arguments of a call that are not tensors.
struct LinearCall {
  ProductInput::Kind kind;
  at::ScalarType compute;
  grad::WeightGradient when;
};

/// grad^T x, of a weight.
grad::Product weight_product(const at::Tensor& grad, const at::Tensor& x) {
  using Reads = grad::Product::Reads;
  grad::Product product{.sizes = {grad.size(1), x.size(1)},
                        .dtype = grad.scalar_type(),
                        // Detached: else its node keeps those before it until W, and with them the
                        // inputs of recomputed layers and of the stage.
                        .reads = {grad, x.detach()},
                        .form = [](const Reads& of) { return base::mm(of[0].t(), of[1]); }};
  // In a backward inside autocast mm() has another dtype than mm_out(), which is left alone there.
  if (at::autocast::is_autocast_enabled(x.device().type())) return product;
  product.write = [](const Reads& of, const at::Tensor& slot) {
    at::Tensor out = slot;
    base::mm_out(out, of[0].t(), of[1]);
  };
  return product;
}

/// [..., K] as [M, K]; M may be 0.
at::Tensor by_token(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  const auto sizes = x.sizes();
  return x.reshape({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
}

/// The input of a product as [M, K].
at::Tensor input_rows(ProductInput::Kind kind, const at::Tensor& x, const at::Tensor& up,
                      at::ScalarType compute) {
  return by_token(formed_again(kind, x, up)).to(compute);
}

/// One node a layer, plain products of 2-D views, nothing computed for what needs no gradient. A
/// gate before the product is part of it.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& second, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const LinearCall& call) {
    weight.const_data_ptr();    // a parameter without data says so here, not from inside a product
    const WideScope own_dtype;  // the result has the input's
    const bool is_gate = call.kind != ProductInput::Kind::kItself;
    const at::Tensor up = second ? second->contiguous() : at::Tensor();
    const at::Tensor x =
        is_gate ? input.contiguous() : input_rows(call.kind, input, up, call.compute);
    std::vector<std::int64_t> shape = input.sizes().vec();
    const std::int64_t rows = c10::multiply_integers(shape.begin(), shape.end() - 1);
    const at::Tensor y = keep({rows, weight.size(0)}, [&] {
      const at::Tensor left = input_rows(call.kind, x, up, call.compute);
      const at::Tensor matrix = weight.to(call.compute).t();
      return bias ? base::addmm(bias->to(call.compute), left, matrix) : base::mm(left, matrix);
    });
    ctx->set_materialize_grads(false);
    // A frozen weight has no use for its input.
    ctx->save_for_backward({is_gate || weight.requires_grad() ? x : at::Tensor(), up, weight});
    ctx->saved_data["kind"] = static_cast<std::int64_t>(call.kind);
    ctx->saved_data["compute"] = call.compute;
    ctx->saved_data["at_once"] = call.when == grad::WeightGradient::kAtOnce;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["input_dtype"] = input.scalar_type();
    shape.back() = weight.size(0);
    return y.to(input.scalar_type()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(5);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &up = saved[1], &weight = saved[2];
    const auto kind = static_cast<ProductInput::Kind>(ctx->saved_data["kind"].toInt());
    const at::ScalarType compute = ctx->saved_data["compute"].toScalarType();
    const at::Tensor grad = by_token(grads[0]).to(compute);
    // Edges are counted over tensors: there is none for one that is absent.
    const std::size_t of_weight = up.defined() ? 2 : 1;
    variable_list result(5);
    if (ctx->needs_input_grad(0) || (up.defined() && ctx->needs_input_grad(1))) {
      std::vector<std::int64_t> shape = grads[0].sizes().vec();
      shape.back() = weight.size(1);
      result[0] = base::mm(grad, weight.to(compute))
                      .to(ctx->saved_data["input_dtype"].toScalarType())
                      .view(shape);
    }
    if (ctx->needs_input_grad(of_weight)) {
      const at::Tensor left = input_rows(kind, x, up, compute);
      result[2] = grad::weight_gradient(weight, weight_product(grad, left),
                                        ctx->saved_data["at_once"].toBool()
                                            ? grad::WeightGradient::kAtOnce
                                            : grad::WeightGradient::kMayWait);
    }
    // Its sum is too small to be deferred.
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(of_weight + 1)) {
      result[3] = grad.sum(0);
    }
    if (result[0].defined()) {
      std::tie(result[0], result[1]) = formed_backward(result[0], kind, x, up);
    }
    return result;
  }
};

}  // namespace

at::Tensor linear(const ProductInput& given, const at::Tensor& weight, const at::Tensor& bias,
                  std::optional<at::ScalarType> compute, grad::WeightGradient when) {
  const ProductInput input = given.is_kept_as_gate() ? given : ProductInput(given.formed());
  return LinearFunction::apply(
      input.x, input.second(), weight, bias.defined() ? std::make_optional(bias) : std::nullopt,
      LinearCall{input.kind, compute.value_or(weight.scalar_type()), when});
}

LinearPlacement column_parallel(const TensorRegion& region) {
  return {region.column(), region.column(), region.inside(), region.column()};
}

LinearPlacement side_by_side(const TensorRegion& region, const std::vector<std::int64_t>& outputs) {
  const ParameterLayout rows = region.sections(outputs);
  LinearPlacement placement{rows, rows, region.inside(), rows};
  // Optimizers of matrices know equal shares alone: others are one matrix to them.
  if (std::ranges::count(outputs, outputs.front()) == std::ssize(outputs)) {
    placement.fused = {.count = static_cast<int>(outputs.size()), .dim = 0};
  }
  return placement;
}

// An adapter's first product is an addend then; the second is linear in it, so it stays one.
LinearPlacement row_parallel(const TensorRegion& region) {
  return {region.row(), region.inside(), region.row(), region.inside(), region.rank()};
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
  weight = add_parameter("weight", {out_features, in_features},
                         {.layout = placement_.weight, .fused = placement_.fused});
  if (with_bias == Bias::kYes) {
    bias = add_parameter("bias", {out_features}, bias_of_layer(placement_.bias));
  }
}

at::Tensor Linear::product(const ProductInput& input, const at::Tensor& with_bias) const {
  if (!lora_a_) return linear(input, weight, with_bias, std::nullopt, when_);
  const at::Tensor x = input.formed();  // which the adapter keeps in any case
  return nn::add_adapter(linear(x, weight, with_bias, std::nullopt, when_), x, lora_a_->weight,
                         lora_b_->weight, lora_);
}

at::Tensor Linear::whole_weight(at::ScalarType dtype) const {
  const at::NoGradGuard no_grad;
  if (!lora_a_) return weight.to(dtype);
  const at::ScalarType wide =
      at::promote_types(weight.scalar_type(), lora_a_->weight.scalar_type());
  const at::Tensor product = base::mm(lora_b_->weight.to(wide), lora_a_->weight.to(wide));
  return (weight.to(wide) + product * lora_.scale).to(dtype);
}

at::Tensor Linear::forward(const ProductInput& input) { return product(input, bias); }

at::Tensor Linear::forward_into(
    const TensorRegion& region, torch::nn::Module& layer, const std::vector<at::Tensor>& inputs,
    std::function<ProductInput(const std::vector<at::Tensor>&)> inside) {
  if (region.size() == 1) return forward(inside(inputs));
  // One rank's addend has the bias: it is in the sum once, and rounded with it.
  std::vector<at::Tensor> all = inputs;
  at::Tensor once = bias.defined() ? parallel::only_first(bias, region.axis()) : bias;
  // Not the parameter itself, of which a region would not know that it is one.
  if (once.defined() && grad::regions_here() != nullptr) once = once.clone();
  all.push_back(std::move(once));
  const auto addend = [this, inside = std::move(inside)](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{product(inside(in), in.back())};
  };
  return region.leave(grad::in_region(layer, "", all, addend).front());
}

void Linear::declare_all(const ParameterLayout& layout) {
  placement_ = {layout, layout, layout, layout};
  PlacedModule::declare_all(layout);
}

void Linear::add_adapter(const LoraOptions& options) {
  TESSERA_INVARIANT(!lora_a_, "a second adapter of ", options.layer);
  lora_ = options;
  lora_.first_column = placement_.input_part * weight.size(1);
  lora_a_ =
      register_module("lora_A", std::make_shared<Linear>(weight.size(1), options.rank, Bias::kNo,
                                                         LinearPlacement{placement_.lora_a}));
  lora_b_ = register_module(
      "lora_B", std::make_shared<Linear>(
                    options.rank, weight.size(0), Bias::kNo,
                    LinearPlacement{.weight = placement_.lora_b, .fused = placement_.fused}));
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

namespace {

/// Returns the factors of all of x; undefined where nothing is dropped.
at::Tensor factors_of(const at::Tensor& x, const DropoutDraw& draw, at::ScalarType dtype) {
  if (draw.probability <= 0) return {};
  return dropout_factors(draw, x.sizes().vec(), dtype, x.device());
}

/// [..., K] as [M, K] in the adapter's dtype, what is dropped left out.
at::Tensor adapter_input(const at::Tensor& x, const at::Tensor& factors, at::ScalarType dtype) {
  const at::Tensor wide = x.to(dtype);
  return by_token(factors.defined() ? wide * factors : wide);
}

/// Goes from forward to backward, which drops the same elements.
struct HeldDraw : torch::CustomClassHolder {
  explicit HeldDraw(DropoutDraw of_forward) : draw(std::move(of_forward)) {}
  const DropoutDraw draw;
};

/// Saves for backward x in its own dtype, which the frozen layer holds too, and [M, R].
struct AdapterFunction : torch::autograd::Function<AdapterFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& base, const at::Tensor& x,
                            const at::Tensor& a, const at::Tensor& b, double scale,
                            const DropoutDraw& draw) {
    const WideScope own_dtype;  // the result has the layer's
    const at::ScalarType dtype = a.scalar_type();
    const at::Tensor input = adapter_input(x, factors_of(x, draw, dtype), dtype);
    const at::Tensor hidden = base::mm(input, a.t());
    const at::Tensor delta = base::mm(hidden, b.t()).mul_(scale).view(base.sizes());
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, a, b, hidden});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["draw"] = c10::IValue::make_capsule(c10::make_intrusive<HeldDraw>(draw));
    return (base.to(a.scalar_type()) + delta).to(base.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& a = saved[1];
    const at::Tensor& b = saved[2];
    const auto held =
        c10::dynamic_intrusive_pointer_cast<HeldDraw>(ctx->saved_data["draw"].toCapsule());
    const DropoutDraw& draw = held->draw;
    const at::Tensor grad =
        by_token(grads[0]).to(a.scalar_type()) * ctx->saved_data["scale"].toDouble();
    const at::Tensor grad_hidden = base::mm(grad, b);
    // Drawn once: of all that is done here it takes longest.
    const bool is_used = ctx->needs_input_grad(1) || ctx->needs_input_grad(2);
    const at::Tensor factors = is_used ? factors_of(x, draw, a.scalar_type()) : at::Tensor();
    variable_list result(6);
    if (ctx->needs_input_grad(0)) result[0] = grads[0];
    if (ctx->needs_input_grad(1)) {
      at::Tensor grad_x = base::mm(grad_hidden, a).view(x.sizes());
      if (factors.defined()) grad_x.mul_(factors);
      result[1] = grad_x.to(x.scalar_type());
    }
    if (ctx->needs_input_grad(2)) {
      result[2] = base::mm(grad_hidden.t(), adapter_input(x, factors, a.scalar_type()));
    }
    if (ctx->needs_input_grad(3)) result[3] = base::mm(grad.t(), saved[3]);
    return result;
  }
};

}  // namespace

at::Tensor add_adapter(const at::Tensor& base, const at::Tensor& x, const at::Tensor& a,
                       const at::Tensor& b, const LoraOptions& options) {
  a.const_data_ptr();  // a parameter without data says so here, not from inside a product
  b.const_data_ptr();
  const auto place = sample_place();
  const bool drops = options.dropout > 0 && place;
  return AdapterFunction::apply(base, x, a, b, options.scale,
                                drops ? dropout_draw(options, *place) : DropoutDraw{});
}

}  // namespace tessera::nn
