// Layers in fp64 can be differentiated twice, as the ATen operations that they are made of.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "tessera/error.h"

namespace tessera::nn::second_derivative_test {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Layer {
  std::string name;
  std::function<at::Tensor(const Tensors&)> run;
  std::vector<std::vector<std::int64_t>> sizes;  ///< of its inputs
};

class SecondDerivative : public ::testing::Test {
 protected:
  at::Tensor draw(at::IntArrayRef sizes) {
    return at::randn(sizes, generator_, at::TensorOptions(at::kDouble));
  }
  Tensors draw_all(const Layer& layer) {
    Tensors all;
    for (const auto& sizes : layer.sizes) all.push_back(draw(sizes));
    return all;
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(20261123);
};

Tensors leaves_of(const Tensors& values) {
  Tensors leaves;
  for (const auto& value : values) leaves.push_back(value.detach().clone().requires_grad_(true));
  return leaves;
}

/// Slope of the result, weighted, along `direction` in the inputs, with a graph of its own.
at::Tensor slope(const Layer& layer, const Tensors& inputs, const at::Tensor& weights,
                 const Tensors& direction) {
  const auto y = (layer.run(inputs) * weights).sum();
  const auto grads = torch::autograd::grad({y}, inputs, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) sum = sum + (grads[i] * direction[i]).sum();
  }
  return sum;
}

std::vector<Layer> layers() {
  const auto targets = at::tensor({1, 4, -100, 0, 2, 6}, at::kLong).view({2, 3});
  const auto ids = at::tensor({1, 0, 5, 1, 1, 3}, at::kLong).view({2, 3});
  const auto table = [](std::int64_t positions) {
    return Rope({}, 4).table(positions, at::kDouble, at::kCPU);
  };
  return {
      {"norm", [](const Tensors& in) { return rms_norm(in[0], in[1], 1e-6); }, {{3, 8}, {8}}},
      {"norm of a view",
       [](const Tensors& in) { return rms_norm(in[0].t(), in[1], 1e-6); },
       {{8, 3}, {8}}},
      {"sum and norm",
       [](const Tensors& in) {
         const auto [sum, y] = add_rms_norm(in[0], in[0].cos() * in[1], in[2], 1e-6);
         return sum * y;
       },
       {{3, 8}, {3, 8}, {8}}},
      {"rope",
       [&](const Tensors& in) { return rope_heads(in[0].sin(), {.heads = 2}, {}, table(3)); },
       {{2, 3, 8}}},
      {"rope with a norm",
       [&](const Tensors& in) { return rope_heads(in[0], {.heads = 2}, {in[1], 1e-6}, table(3)); },
       {{2, 3, 8}, {4}}},
      {"swiglu", [](const Tensors& in) { return swiglu(in[0], in[1]); }, {{3, 5}, {3, 5}}},
      {"swiglu of halves", [](const Tensors& in) { return swiglu_halves(in[0]); }, {{3, 10}}},
      {"attention",
       [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.5); },
       {{1, 2, 3, 2, 4}, {1, 2, 3, 1, 4}, {1, 3, 8}}},
      {"embedding", [=](const Tensors& in) { return nn::embedding(ids, in[0].sin()); }, {{6, 4}}},
      {"loss",
       [=](const Tensors& in) { return cross_entropy_sum(in[0], targets, Logits::kKeep); },
       {{2, 3, 7}}},
      {"loss over its logits",
       [=](const Tensors& in) { return cross_entropy_sum(in[0] * 1.0, targets, Logits::kConsume); },
       {{2, 3, 7}}},
  };
}

TEST_F(SecondDerivative, IsThatOfDifferencesOfTheFirst) {
  for (const auto& layer : layers()) {
    SCOPED_TRACE(layer.name);
    const auto values = draw_all(layer);
    const auto along = draw_all(layer), across = draw_all(layer);
    const auto weights = draw(layer.run(values).sizes());
    const auto inputs = leaves_of(values);
    const auto second = torch::autograd::grad({slope(layer, inputs, weights, along)}, inputs, {},
                                              std::nullopt, false, /*allow_unused=*/true);
    double found = 0;
    for (std::size_t i = 0; i < second.size(); ++i) {
      if (second[i].defined()) found += (second[i] * across[i]).sum().item<double>();
    }
    constexpr double kStep = 1e-5;
    const auto slope_at = [&](double step) {
      Tensors moved;
      for (std::size_t i = 0; i < values.size(); ++i) moved.push_back(values[i] + across[i] * step);
      return slope(layer, leaves_of(moved), weights, along).item<double>();
    };
    const double expected = (slope_at(kStep) - slope_at(-kStep)) / (2 * kStep);
    // Rounding of the slopes over the step is 2^-53 x 1e2 / 1e-5, the third derivative times the
    // step squared 1e-8.
    EXPECT_NEAR(found, expected, 1e-6 * (1 + std::abs(expected)));
    EXPECT_GT(std::abs(expected), 1e-3) << "a case that shows nothing";
  }
}

}  // namespace
}  // namespace tessera::nn::second_derivative_test
