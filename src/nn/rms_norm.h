// RMSNorm as Hugging Face's models compute it, returned in the input's dtype.
//
// Llama's and Qwen3's composite form rounds the normed value to the input's dtype before it
// multiplies by the weight, as theirs does; Gemma's, gpt-oss' and OLMo 2's multiply first. Gemma
// 4's may have no weight, Gemma 3's is 1 + weight. The CPU kernel stays in fp32 and rounds once in
// both forms. Next: rope.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "nn/parameter.h"
#include "parallel/axis.h"

namespace tessera::nn {

enum class NormRounding : std::uint8_t {
  kBeforeWeight,
  kOnce,  ///< after the weight
};

/// The factor that a norm multiplies by.
enum class NormFactor : std::uint8_t {
  kWeight,
  kOnePlusWeight,  ///< in fp32 at least; the weight begins as 0
};

/// x [..., K], weight [K] -> [..., K] in x's dtype.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormRounding rounding = NormRounding::kBeforeWeight);

/// RMSNorm over columns that ranks share in equal parts: x [..., K] and weight [K] of this rank ->
/// [..., K] in x's dtype. Multiplies by the weight before it rounds. The mean is that of all ranks'
/// columns: a column that ranks hold copies of counts as often, and has a part of its gradient on
/// each. Placement: S -> S. Collective, forward and backward; a rank sends an fp32 number a row in
/// each.
at::Tensor shared_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                           const parallel::Axis& axis);

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
          ParameterLayout layout = {}, NormFactor factor = NormFactor::kWeight);
  at::Tensor forward(const at::Tensor& x);
  /// As shared_rms_norm; with one rank as forward.
  at::Tensor forward_shared(const at::Tensor& x, const parallel::Axis& axis);
  SumAndNorm add_forward(const at::Tensor& x, const at::Tensor& residual);
  double eps() const { return eps_; }
  NormRounding rounding() const { return rounding_; }
  /// Returns the factor that it multiplies by, [size].
  at::Tensor factor() const;

  at::Tensor weight;  ///< [size]

 private:
  double eps_;
  NormRounding rounding_;
  NormFactor factor_;
};

}  // namespace tessera::nn
