// RMSNorm as Hugging Face's models compute it, returned in the input's dtype whatever the weight's.
//
// Llama's and Qwen3's composite form rounds the normed value to the input's dtype before it
// multiplies by the weight, as theirs does; Gemma's and gpt-oss' multiply first. Gemma's may have
// no weight. The CPU kernel stays in fp32 and rounds once for both. Next: rope.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "nn/parameter.h"

namespace tessera::nn {

enum class NormRounding : std::uint8_t {
  kBeforeWeight,
  kOnce,  ///< after the weight
};

/// x [..., K], weight [K] -> [..., K] in x's dtype.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormRounding rounding = NormRounding::kBeforeWeight);

/// The same without a weight: x [..., K] -> [..., K].
at::Tensor plain_rms_norm(const at::Tensor& x, double eps);

struct SumAndNorm {
  at::Tensor sum;
  at::Tensor normed;
};

/// x + residual in x's dtype, and its norm: the end of one block and the beginning of the next.
SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps, NormRounding rounding = NormRounding::kBeforeWeight);

class RmsNorm : public PlacedModule {
 public:
  RmsNorm(std::int64_t size, double eps, NormRounding rounding = NormRounding::kBeforeWeight,
          ParameterLayout layout = {});
  at::Tensor forward(const at::Tensor& x);
  SumAndNorm add_forward(const at::Tensor& x, const at::Tensor& residual);
  double eps() const { return eps_; }
  NormRounding rounding() const { return rounding_; }

  at::Tensor weight;  ///< [size]

 private:
  double eps_;
  NormRounding rounding_;
};

}  // namespace tessera::nn
