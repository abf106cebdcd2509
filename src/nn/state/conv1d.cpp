#include "nn/state/conv1d.h"

#include "nn/state/short_convolution.h"

namespace tessera::nn {

Conv1d::Conv1d(std::int64_t channels, std::int64_t width, Bias with_bias,
               const ParameterLayout& layout) {
  weight = add_parameter("weight", {channels, 1, width},
                         {.layout = layout, .decay = DecayClass::kConvolution});
  if (with_bias == Bias::kYes) bias = add_parameter("bias", {channels}, bias_of_layer(layout));
}

at::Tensor Conv1d::forward(const at::Tensor& x, const Documents& documents) const {
  return short_convolution(x, weight, bias, documents);
}

at::Tensor Conv1d::after(const at::Tensor& x, at::Tensor& context) const {
  return short_convolution_after(x, weight, bias, context);
}

}  // namespace tessera::nn
