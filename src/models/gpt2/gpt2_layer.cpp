#include "models/gpt2/gpt2_layer.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "grad/region.h"
#include "models/recomputed.h"
#include "nn/attention/attention_parts.h"
#include "nn/attention/context_attention.h"
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
    // It only needs to know that there is a bias.
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

namespace {

constexpr std::int64_t kParts = 3;  // queries, keys and values

/// Takes from each part in the last dim the columns of this rank's heads.
at::Tensor own_columns(const at::Tensor& all, const nn::TensorRegion& region) {
  if (region.size() == 1) return all;
  const at::Tensor by_part = all.unflatten(-1, {kParts, -1});
  const std::int64_t own = region.part_of(by_part.size(-1));
  return by_part.narrow(-1, region.rank() * own, own).flatten(-2);
}

}  // namespace

Gpt2Attention::Gpt2Attention(const ModelSpec& spec, const nn::TensorRegion& region,
                             nn::ContextRegion context)
    : heads_(region.part_of(spec.num_attention_heads)),
      scale_(1.0 / std::sqrt(static_cast<double>(spec.head_dim))),
      region_(region),
      context_(std::move(context)) {
  const std::int64_t hidden = spec.hidden_size;
  // Columns of queries, keys and values stand in one matrix, of which a rank needs some of each: it
  // has all of it, computes with its own, and gives a gradient that is zero elsewhere.
  c_attn_ = register_module("c_attn", std::make_shared<TransposedLinear>(TransposedLinear::Options{
                                          .in = hidden,
                                          .out = kParts * hidden,
                                          .weight = region.inside(),
                                          .bias = region.inside(),
                                          .fused = {.count = static_cast<int>(kParts), .dim = 1}}));
  c_proj_ = register_module(
      "c_proj", std::make_shared<TransposedLinear>(row_parallel(region, hidden, hidden)));
}

Gpt2Attention::Heads Gpt2Attention::project(const at::Tensor& x) {
  const at::Tensor all =
      nn::linear(x, own_columns(c_attn_->weight, region_).t(), own_columns(c_attn_->bias, region_));
  const std::vector<at::Tensor> parts = all.chunk(kParts, 2);
  const auto by_head = [this](const at::Tensor& part) {
    return part.reshape({part.size(0), part.size(1), heads_, part.size(2) / heads_})
        .transpose(1, 2)
        .contiguous()
        .unsqueeze(3);
  };
  return {by_head(parts[0]), by_head(parts[1]), parts[2].contiguous()};
}

at::Tensor Gpt2Attention::forward(const at::Tensor& x, const nn::Documents& documents) {
  const auto mixed = [this, context = documents.context](const std::vector<at::Tensor>& in) {
    const Heads heads = project(in[0]);
    return nn::context_attention({heads.q, heads.k, heads.v}, scale_, {.begins = in[1]},
                                 nn::Scores::kOfInputs, context_, {in[1], context});
  };
  return nn::project_out(*c_proj_, region_, *this, {region_.enter(x), documents.starts}, mixed,
                         documents.are_shared());
}

at::Tensor Gpt2Attention::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::NoGradGuard no_grad;
  const bool is_first = cache.length() == 0;
  const Heads heads = project(x);
  cache.append(heads.k, heads.v);
  return c_proj_->forward(
      is_first ? nn::causal_attention(heads.q, heads.k, heads.v, scale_)
               : nn::cached_attention(heads.q, cache.keys(), cache.values(), scale_));
}

Gpt2Mlp::Gpt2Mlp(const ModelSpec& spec, const nn::TensorRegion& region) : region_(region) {
  c_fc_ = register_module("c_fc", std::make_shared<TransposedLinear>(column_parallel(
                                      region, spec.hidden_size, spec.intermediate_size)));
  c_proj_ = register_module("c_proj", std::make_shared<TransposedLinear>(row_parallel(
                                          region, spec.intermediate_size, spec.hidden_size)));
}

at::Tensor Gpt2Mlp::forward(const at::Tensor& x) {
  const auto activated = [this](const std::vector<at::Tensor>& in) {
    return at::gelu(c_fc_->forward(in[0]), "tanh");
  };
  return c_proj_->forward_into(region_, *this, {region_.enter(x)}, activated);
}

Gpt2Layer::Gpt2Layer(const ModelSpec& spec, std::int64_t number, const ModelAxes& axes)
    : number_(number), is_alone_(axes.shares_no_layer()) {
  const nn::TensorRegion& region = axes.tensor;
  const auto norm = [&](const char* name) {
    return register_module(
        name, std::make_shared<LayerNorm>(spec.hidden_size, spec.rms_norm_eps, region.on_stream()));
  };
  ln_1_ = norm("ln_1");
  attn_ = register_module("attn", std::make_shared<Gpt2Attention>(spec, region, axes.context));
  ln_2_ = norm("ln_2");
  mlp_ = register_module("mlp", std::make_shared<Gpt2Mlp>(spec, region));
}

at::Tensor Gpt2Layer::forward(const at::Tensor& x, const nn::Documents& documents) {
  return recomputed(*this, recompute(), {x, documents.starts},
                    [this, context = documents.context](const std::vector<at::Tensor>& in) {
                      return std::vector<at::Tensor>{body(in[0], {in[1], context})};
                    })
      .front();
}

at::Tensor Gpt2Layer::body(const at::Tensor& x, const nn::Documents& documents) {
  const auto whole = [this, context = documents.context](const std::vector<at::Tensor>& in) {
    const at::Tensor sum = in[0] + attn_->forward(ln_1_->forward(in[0]), {in[1], context});
    return std::vector<at::Tensor>{sum + mlp_->forward(ln_2_->forward(sum))};
  };
  const std::vector<at::Tensor> inputs{x, documents.starts};
  return is_alone_ ? grad::in_region(*this, "", inputs, whole).front() : whole(inputs).front();
}

at::Tensor Gpt2Layer::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::Tensor sum = x + attn_->decode(ln_1_->forward(x), cache);
  return sum + mlp_->forward(ln_2_->forward(sum));
}

}  // namespace tessera::models
