#include "nn/state/short_convolution.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "base/first_derivative.h"
#include "base/threads/shapes_only.h"
#include "kernels/on_cpu.h"
#include "nn/wide_dtype.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The sums before the silu, for ranges of positions: what one range needs stays in the cache.
class ShortSums {
 public:
  ShortSums(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
            const Documents& documents)
      : x_(x),
        starts_(documents.starts),
        compute_(weight.scalar_type()),
        wide_(wide_dtype(compute_)),
        factors_(weight.squeeze(1).t().to(wide_).contiguous()),
        bias_(bias.defined() ? bias.to(wide_) : bias) {}

  std::int64_t width() const { return factors_.size(0); }
  at::ScalarType compute() const { return compute_; }
  at::TensorOptions wide_options() const { return x_.options().dtype(wide_); }
  at::Tensor factor(std::int64_t back) const { return factors_[width() - 1 - back]; }
  std::int64_t positions_at_once() const {
    constexpr std::int64_t kElements = std::int64_t{1} << 18;
    if (!kernels::on_cpu(x_)) return x_.size(1);
    return std::max<std::int64_t>(width(),
                                  kElements / std::max<std::int64_t>(1, x_.size(0) * x_.size(2)));
  }
  /// Inputs of positions [begin, end) and of the width - 1 in front of them, rounded and widened.
  at::Tensor inputs(std::int64_t begin, std::int64_t end) const;
  /// Those of `inputs` that lie so far back, 0 where another document has them.
  at::Tensor shifted(const at::Tensor& inputs, std::int64_t begin, std::int64_t back) const {
    const std::int64_t count = inputs.size(1) - (width() - 1);
    return without_others(inputs.narrow(1, width() - 1 - back, count), begin, back);
  }
  /// values [B, count, C] at positions from `begin` on, 0 for those whose document begins less than
  /// `back` before them.
  at::Tensor without_others(const at::Tensor& values, std::int64_t begin, std::int64_t back) const;
  at::Tensor sums(const at::Tensor& inputs, std::int64_t begin) const;

 private:
  const at::Tensor& x_;
  const at::Tensor starts_;
  const at::ScalarType compute_, wide_;
  const at::Tensor factors_;  // [W, C]
  const at::Tensor bias_;
};

at::Tensor ShortSums::inputs(std::int64_t begin, std::int64_t end) const {
  const std::int64_t halo = width() - 1, missing = std::max<std::int64_t>(0, halo - begin);
  const at::Tensor result = at::empty({x_.size(0), end - begin + halo, x_.size(2)}, wide_options());
  result.narrow(1, 0, missing).zero_();
  result.narrow(1, missing, result.size(1) - missing)
      .copy_(x_.narrow(1, begin - halo + missing, end - begin + halo - missing).to(compute_));
  return result;
}

at::Tensor ShortSums::without_others(const at::Tensor& values, std::int64_t begin,
                                     std::int64_t back) const {
  if (!starts_.defined() || back == 0) return values;
  const std::int64_t count = values.size(1);
  const at::Tensor before = at::arange(begin - back, begin - back + count, starts_.options());
  return values.masked_fill((starts_.narrow(1, begin, count) > before).unsqueeze(2), 0);
}

at::Tensor ShortSums::sums(const at::Tensor& inputs, std::int64_t begin) const {
  const at::Tensor result = shifted(inputs, begin, 0) * factor(0);
  for (std::int64_t back = 1; back < width(); ++back) {
    result.addcmul_(shifted(inputs, begin, back), factor(back));
  }
  return bias_.defined() ? result.add_(bias_) : result;
}

at::Tensor short_convolution_of(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias, const Documents& documents) {
  const WideScope inside;
  const ShortSums convolution(x, weight, bias, documents);
  const at::Tensor result = at::empty(x.sizes(), x.options());
  const std::int64_t step = convolution.positions_at_once();
  for (std::int64_t begin = 0; begin < x.size(1); begin += step) {
    const std::int64_t end = std::min(begin + step, x.size(1));
    const at::Tensor sums = convolution.sums(convolution.inputs(begin, end), begin);
    result.narrow(1, begin, end - begin).copy_(at::silu(sums.to(convolution.compute())));
    if (base::shapes_only()) break;  // one range takes what each does
  }
  return result;
}

struct ShortConvolutionGrads {
  at::Tensor x, weight, bias;
};

/// From the last range of positions to the first: a position has gradients from those behind it.
ShortConvolutionGrads short_convolution_backward(const at::Tensor& grad, const at::Tensor& x,
                                                 const at::Tensor& weight, const at::Tensor& bias,
                                                 const Documents& documents) {
  const WideScope inside;
  const ShortSums convolution(x, weight, bias, documents);
  const std::int64_t halo = convolution.width() - 1, rows = x.size(0), channels = x.size(2);
  const auto wide = convolution.wide_options();
  const at::Tensor grad_x = at::empty(x.sizes(), x.options());
  const at::Tensor grad_factors = at::zeros({halo + 1, channels}, wide);
  const at::Tensor grad_bias = at::zeros({channels}, wide);
  const std::int64_t step = convolution.positions_at_once();
  at::Tensor behind = at::zeros({rows, halo, channels}, wide);
  for (std::int64_t begin = (x.size(1) - 1) / step * step; begin >= 0; begin -= step) {
    const std::int64_t end = std::min(begin + step, x.size(1)), count = end - begin;
    const at::Tensor inputs = convolution.inputs(begin, end);
    const at::Tensor sums = convolution.sums(inputs, begin).to(convolution.compute()).to(wide);
    const at::Tensor grad_of_range =
        grad.narrow(1, begin, count).to(convolution.compute()).to(wide);
    const at::Tensor grad_sums = at::cat({at::silu_backward(grad_of_range, sums), behind}, 1);
    const at::Tensor own = grad_sums.narrow(1, 0, count);
    if (bias.defined()) grad_bias.add_(own.sum({0, 1}));
    const at::Tensor grad_inputs = own * convolution.factor(0);
    grad_factors[halo].add_(at::mul(own, inputs.narrow(1, halo, count)).sum({0, 1}));
    for (std::int64_t back = 1; back <= halo; ++back) {
      grad_factors[halo - back].add_(
          at::mul(own, convolution.shifted(inputs, begin, back)).sum({0, 1}));
      // Positions behind the row have no start: theirs are zeros.
      const std::int64_t there = std::min(count, x.size(1) - begin - back);
      if (there <= 0) continue;
      grad_inputs.narrow(1, 0, there)
          .addcmul_(
              convolution.without_others(grad_sums.narrow(1, back, there), begin + back, back),
              convolution.factor(back));
    }
    grad_x.narrow(1, begin, count).copy_(grad_inputs);
    behind = grad_sums.narrow(1, 0, halo).clone();
    if (base::shapes_only() && count == std::min(step, x.size(1))) break;  // as in forward
  }
  return {grad_x, grad_factors.t().unsqueeze(1).to(convolution.compute()).contiguous(),
          bias.defined() ? grad_bias.to(convolution.compute()) : at::Tensor()};
}

struct ShortConvolutionFunction : torch::autograd::Function<ShortConvolutionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& starts) {
    const at::Tensor none;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, bias.value_or(none), starts.value_or(none)});
    return short_convolution_of(x, weight, bias.value_or(none), {starts.value_or(none)});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const ShortConvolutionGrads of =
        short_convolution_backward(grads[0], saved[0], saved[1], saved[2], {saved[3]});
    return {of.x, of.weight, of.bias, at::Tensor()};
  }
};

}  // namespace

at::Tensor short_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             const Documents& documents) {
  TESSERA_INVARIANT(x.dim() == 3 && weight.dim() == 3 && weight.size(0) == x.size(2),
                    "channels of a convolution that do not fit");
  if (!c10::GradMode::is_enabled()) return short_convolution_of(x, weight, bias, documents);
  return ShortConvolutionFunction::apply(x, weight, given(bias), given(documents.starts));
}

at::Tensor short_convolution_after(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& bias, at::Tensor& context) {
  const at::NoGradGuard no_grad;
  const std::int64_t halo = weight.size(2) - 1;
  if (!context.defined()) context = at::zeros({x.size(0), halo, x.size(2)}, x.options());
  const at::Tensor all = at::cat({context, x}, 1);
  context = all.narrow(1, all.size(1) - halo, halo).clone();
  return short_convolution(all, weight, bias, {}).narrow(1, halo, x.size(1)).contiguous();
}

}  // namespace tessera::nn
