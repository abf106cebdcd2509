#include "nn/mlp.h"

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

Mlp::Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias,
         const TensorRegion& region, Gate gate, GateAndUp first)
    : region_(region), gate_(gate) {
  const auto add = [&](const char* name, std::int64_t out, LinearPlacement placement) {
    return register_module(name,
                           std::make_shared<Linear>(hidden_size, out, bias, std::move(placement)));
  };
  if (first == GateAndUp::kFused) {
    TESSERA_INVARIANT(gate == Gate::kSilu, "gate and up in one with another gate than SiLU");
    const std::int64_t whole = region.size() * intermediate_size;
    gate_up_proj_ =
        add("gate_up_proj", 2 * intermediate_size, side_by_side(region, {whole, whole}));
  } else {
    if (gate != Gate::kNone) {
      gate_proj_ = add("gate_proj", intermediate_size, column_parallel(region));
    }
    up_proj_ = add("up_proj", intermediate_size, column_parallel(region));
  }
  down_proj_ = register_module("down_proj", std::make_shared<Linear>(intermediate_size, hidden_size,
                                                                     bias, row_parallel(region)));
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return down_proj_->forward_into(
      region_, *this, {region_.enter(x)},
      [this](const std::vector<at::Tensor>& in) { return inner(in[0]); });
}

at::Tensor Mlp::addend(const at::Tensor& x) {
  TESSERA_INVARIANT(region_.size() == 1 || !down_proj_->bias.defined(), "a bias added n times");
  return down_proj_->forward(inner(x));
}

at::Tensor Mlp::inner(const at::Tensor& x) {
  if (gate_up_proj_) return swiglu_halves(gate_up_proj_->forward(x));
  if (gate_ == Gate::kNone) return relu_squared(up_proj_->forward(x));
  const at::Tensor gate = gate_proj_->forward(x);
  const at::Tensor up = up_proj_->forward(x);
  return gate_ == Gate::kSilu ? swiglu(gate, up) : geglu(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::gelu(gate, "tanh") * up;
}

GegluMlp::GegluMlp(std::int64_t hidden_size, std::int64_t intermediate_size, WeightName weight_name,
                   const TensorRegion& region)
    : region_(region) {
  const Projection in{hidden_size, intermediate_size, weight_name, column_parallel(region)};
  gate_proj_ = add_projection(*this, "gate_proj", in);
  up_proj_ = add_projection(*this, "up_proj", in);
  down_proj_ = add_projection(*this, "down_proj",
                              {intermediate_size, hidden_size, weight_name, row_parallel(region)});
}

at::Tensor GegluMlp::forward(const at::Tensor& x) {
  return down_proj_->forward_into(
      region_, *this, {region_.enter(x)}, [this](const std::vector<at::Tensor>& in) {
        return geglu(gate_proj_->forward(in[0]), up_proj_->forward(in[0]));
      });
}

at::Tensor swiglu_halves(const at::Tensor& both) {
  return base::has_second_derivatives(both) ? kernels::swiglu_halves(both)
                                            : SwigluHalvesFunction::apply(both);
}

at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options) {
  return ClampedSwigluFunction::apply(both, options.alpha, options.limit);
}

}  // namespace tessera::nn
