// A fused function against its composite form in fp64: outputs and all gradients.
#pragma once

#include <ATen/ATen.h>

#include "support/test.h"

namespace tessera::nn {

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// The output, then one gradient an input.
inline std::vector<at::Tensor> run(const Function& function, std::vector<at::Tensor> inputs,
                                   const at::Tensor& grad) {
  for (at::Tensor& input : inputs) input = input.detach().clone().requires_grad_(true);
  const at::Tensor output = function(inputs);
  output.backward(grad.to(output.scalar_type()));
  std::vector<at::Tensor> results{output.detach()};
  for (const at::Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

/// How far results may be from the fp64 ones: `relative` of the element itself (a rounding of the
/// result) plus `absolute` of the largest element (sums of many terms).
struct Bound {
  double relative;
  double absolute;
};

/// One rounding to bf16 is at most 2^-8 of the value; what happened before it is fp32.
inline constexpr Bound kOneBFloat16Rounding{1.0 / 256, 2e-6};
/// fp32 has 2^-24 a rounding; sums here have at most some hundred terms.
inline constexpr Bound kFloat32{4e-7, 2e-6};

inline void expect_close(const at::Tensor& found, const at::Tensor& expected, const Bound& bound,
                         const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  if (found.numel() == 0) return;
  const at::Tensor wide = expected.to(at::kDouble);
  const at::Tensor allowed = wide.abs() * bound.relative + bound.absolute * wide.abs().max();
  const at::Tensor excess = (found.to(at::kDouble) - wide).abs() - allowed;
  EXPECT_FALSE(found.isnan().any().item<bool>()) << what;
  EXPECT_LE(excess.max().item<double>(), 0.0) << what;
}

/// `inputs` are rounded to their dtypes already; the composite form sees the same values in fp64.
inline void expect_equals_composite(const Function& fused, const Function& composite,
                                    const std::vector<at::Tensor>& inputs, const Bound& bound,
                                    const std::string& what) {
  std::vector<at::Tensor> wide;
  for (const at::Tensor& input : inputs) wide.push_back(input.to(at::kDouble));
  const at::Tensor shape = composite(wide);
  const at::Tensor grad = at::randn(shape.sizes()).to(at::kBFloat16);
  const std::vector<at::Tensor> found = run(fused, inputs, grad);
  const std::vector<at::Tensor> expected = run(composite, wide, grad);
  EXPECT_EQ(found[0].scalar_type(), inputs[0].scalar_type()) << what;
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_close(found[i], expected[i], bound,
                 what + (i == 0 ? ": output" : ": gradient " + std::to_string(i - 1)));
  }
}

}  // namespace tessera::nn
