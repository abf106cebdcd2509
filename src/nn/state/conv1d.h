// Conv1d: the weights of a layer's short convolution, one filter a channel, which sees a few
// positions before each one and is followed by SiLU.
//
// Short symbols: B rows, T positions, C channels, W width of a filter. Next: short_convolution.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nn/documents.h"
#include "nn/linear.h"
#include "nn/parameter.h"

namespace tessera::nn {

class Conv1d : public PlacedModule {
 public:
  /// `channels` of this rank; `layout` is that of the channels.
  Conv1d(std::int64_t channels, std::int64_t width, Bias with_bias, const ParameterLayout& layout);
  /// x [B, T, C] -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x, const Documents& documents) const;
  /// The same for positions that follow those of `context`, as short_convolution_after.
  at::Tensor after(const at::Tensor& x, at::Tensor& context) const;

  at::Tensor weight;  ///< [C, 1, W]
  at::Tensor bias;    ///< [C] or undefined
};

}  // namespace tessera::nn
