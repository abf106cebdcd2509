#include "nn/state/gated_rms_norm.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

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

enum class GatePlace : std::uint8_t { kBeforeNorm, kBehindNorm };

struct NormWithGate {
  GatePlace gate;
  std::int64_t groups;  ///< of the last dim
  double eps;
};

/// Calls f(first row, rows) for parts that stay in the cache of a CPU; all at once on a device.
template <class F>
void for_rows_at_once(const at::Tensor& x, const F& f) {
  constexpr std::int64_t kElements = std::int64_t{1} << 18;
  const std::int64_t rows = x.size(0);
  const std::int64_t step =
      kernels::on_cpu(x)
          ? std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, x.size(1) * x.size(2)))
          : rows;
  for (std::int64_t begin = 0; begin < rows; begin += step) {
    f(begin, std::min(step, rows - begin));
    if (base::shapes_only()) return;  // one part takes what each does
  }
}

/// [..., C] -> [rows, groups, C / groups].
at::Tensor by_groups(const at::Tensor& x, std::int64_t groups) {
  const std::int64_t columns = x.size(-1);
  return x.reshape({x.numel() / columns, groups, columns / groups});
}

/// One part of the rows, in the dtype of the computation.
struct NormedPart {
  NormedPart(const at::Tensor& x_rows, const at::Tensor& z_rows, at::ScalarType wide,
             const NormWithGate& norm)
      : x(x_rows.to(wide)), z(z_rows.to(wide)), gate(at::silu(z)) {
    const at::Tensor input = norm.gate == GatePlace::kBeforeNorm ? x * gate : x;
    scale = at::mul(input, input).mean(2, /*keepdim=*/true).add_(norm.eps).rsqrt_();
    normed = input * scale;
    rounded = normed.to(x_rows.scalar_type()).to(wide);
  }
  at::Tensor x, z, gate;
  at::Tensor scale;            ///< [rows, groups, 1]
  at::Tensor normed, rounded;  ///< before and after the rounding to x's dtype
};

at::Tensor gated_norm_of(const at::Tensor& x_input, const at::Tensor& z_input,
                         const at::Tensor& weight, const NormWithGate& norm) {
  const WideScope inside;
  const at::Tensor x = by_groups(x_input, norm.groups), z = by_groups(z_input, norm.groups);
  const at::ScalarType wide = wide_dtype(x);
  const at::Tensor factor = weight.view({norm.groups, -1}).to(wide);
  const at::Tensor result = at::empty_like(x, at::MemoryFormat::Contiguous);
  for_rows_at_once(x, [&](std::int64_t begin, std::int64_t rows) {
    const NormedPart part(x.narrow(0, begin, rows), z.narrow(0, begin, rows), wide, norm);
    const at::Tensor y = part.rounded * factor;
    if (norm.gate == GatePlace::kBehindNorm) y.mul_(part.gate);
    result.narrow(0, begin, rows).copy_(y);
  });
  return result.view(x_input.sizes());
}

struct GatedNormGrads {
  at::Tensor x, z, weight;
};

GatedNormGrads gated_norm_backward(const at::Tensor& grad_input, const at::Tensor& x_input,
                                   const at::Tensor& z_input, const at::Tensor& weight,
                                   const NormWithGate& norm) {
  const WideScope inside;
  const at::Tensor x = by_groups(x_input, norm.groups), z = by_groups(z_input, norm.groups);
  const at::Tensor grad = by_groups(grad_input, norm.groups);
  const at::ScalarType wide = wide_dtype(x);
  const at::Tensor factor = weight.view({norm.groups, -1}).to(wide);
  const at::Tensor grad_x = at::empty_like(x, at::MemoryFormat::Contiguous);
  const at::Tensor grad_z = at::empty_like(z, at::MemoryFormat::Contiguous);
  const at::Tensor grad_factor = at::zeros(factor.sizes(), factor.options());
  for_rows_at_once(x, [&](std::int64_t begin, std::int64_t rows) {
    const NormedPart part(x.narrow(0, begin, rows), z.narrow(0, begin, rows), wide, norm);
    const bool behind = norm.gate == GatePlace::kBehindNorm;
    const at::Tensor of_y = grad.narrow(0, begin, rows).to(wide);
    const at::Tensor of_product = behind ? of_y * part.gate : of_y;  // normed * weight
    grad_factor.add_(at::mul(of_product, part.rounded).sum(0));
    const at::Tensor of_normed = of_product * factor;
    const at::Tensor along = at::mul(of_normed, part.normed).mean(2, /*keepdim=*/true);
    at::Tensor of_input = of_normed.addcmul_(part.normed, along, -1).mul_(part.scale);
    const at::Tensor of_gate = behind ? (of_y * part.rounded).mul_(factor) : of_input * part.x;
    if (!behind) of_input = of_input * part.gate;
    grad_x.narrow(0, begin, rows).copy_(of_input);
    grad_z.narrow(0, begin, rows).copy_(at::silu_backward(of_gate, part.z));
  });
  return {grad_x.view(x_input.sizes()), grad_z.view(z_input.sizes()),
          grad_factor.view(weight.sizes())};
}

struct GatedNormFunction : torch::autograd::Function<GatedNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& z,
                            const at::Tensor& weight, const NormWithGate& norm) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, z, weight});
    ctx->saved_data["gate"] = static_cast<std::int64_t>(norm.gate);
    ctx->saved_data["groups"] = norm.groups;
    ctx->saved_data["eps"] = norm.eps;
    return gated_norm_of(x, z, weight, norm);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const NormWithGate norm{static_cast<GatePlace>(ctx->saved_data["gate"].toInt()),
                            ctx->saved_data["groups"].toInt(), ctx->saved_data["eps"].toDouble()};
    const GatedNormGrads of = gated_norm_backward(grads[0], saved[0], saved[1], saved[2], norm);
    return {of.x, of.z, of.weight, at::Tensor()};
  }
};

at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                      const NormWithGate& norm) {
  TESSERA_INVARIANT(
      x.sizes() == z.sizes() && weight.numel() == x.size(-1) && x.size(-1) % norm.groups == 0,
      "a gate or groups that do not fit what is normalized");
  if (!c10::GradMode::is_enabled()) return gated_norm_of(x, z, weight, norm);
  return GatedNormFunction::apply(x, z, weight, norm);
}

}  // namespace

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                          double eps) {
  return gated_norm(x, z, weight, {GatePlace::kBehindNorm, 1, eps});
}

at::Tensor gated_group_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                            std::int64_t groups, double eps) {
  return gated_norm(x, z, weight, {GatePlace::kBeforeNorm, groups, eps});
}

}  // namespace tessera::nn
