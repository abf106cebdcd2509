#include "nn/state/short_convolution.h"

#include <ATen/ATen.h>

namespace tessera::nn {

at::Tensor short_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             const Documents& documents) {
  const std::int64_t width = weight.size(2), positions = x.size(1);
  const at::Tensor in = x.to(weight.scalar_type());
  at::Tensor sum = bias.defined() ? bias.expand_as(in) : at::zeros_like(in);
  for (std::int64_t back = 0; back < width; ++back) {
    at::Tensor shifted = at::constant_pad_nd(in, {0, 0, back, 0}).narrow(1, 0, positions);
    if (documents.are_packed()) {
      const at::Tensor own = at::arange(positions, documents.starts.options()) - documents.starts;
      shifted = shifted * (own >= back).unsqueeze(2);
    }
    sum = sum + shifted * weight.select(2, width - 1 - back).squeeze(1);
  }
  return at::silu(sum).to(x.scalar_type());
}

at::Tensor short_convolution_after(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& bias, at::Tensor& context) {
  const std::int64_t before = weight.size(2) - 1;
  if (!context.defined()) context = at::zeros({x.size(0), before, x.size(2)}, x.options());
  const at::Tensor all = at::cat({context, x}, 1);
  context = all.narrow(1, all.size(1) - before, before).clone();
  return short_convolution(all, weight, bias, {}).narrow(1, before, x.size(1));
}

}  // namespace tessera::nn
