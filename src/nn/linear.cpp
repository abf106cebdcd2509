#include "nn/linear.h"

#include <ATen/ops/linear.h>

#include "nn/parameter.h"

namespace tessera::nn {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::ScalarType compute = weight.scalar_type();
  const std::optional<at::Tensor> added =
      bias.defined() ? std::optional(bias.to(compute)) : std::nullopt;
  return at::linear(x.to(compute), weight, added).to(x.scalar_type());
}

Linear::Linear(std::int64_t in_features, std::int64_t out_features, Bias with_bias) {
  weight = register_parameter("weight", empty_parameter({out_features, in_features}));
  if (with_bias == Bias::kYes) {
    bias = register_parameter("bias", empty_parameter({out_features}));
  }
}

at::Tensor Linear::forward(const at::Tensor& x) { return linear(x, weight, bias); }

}  // namespace tessera::nn
