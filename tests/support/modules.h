// Small modules of tests: plain torch::nn::Modules as a user writes them.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "support/ranks.h"

namespace tessera::test {

/// x W^T + b in the dtype of its weight; returns that dtype.
class Affine : public torch::nn::Module {
 public:
  Affine(std::uint64_t seed, std::int64_t in, std::int64_t out, at::ScalarType dtype = at::kFloat)
      : weight(register_parameter("weight", seeded(seed, {out, in}, dtype))),
        bias(register_parameter("bias", seeded(seed + 1, {out}, dtype))) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x.to(weight.scalar_type()), weight, bias);
  }
  at::Tensor weight, bias;
};

/// The model of pytorch issue 156784: fp32, fp32, then bf16; the module casts in between.
class MixedMlp : public torch::nn::Module {
 public:
  explicit MixedMlp(std::uint64_t seed)
      : layer1(register_module("layer1", std::make_shared<Affine>(seed, 10, 20))),
        layer2(register_module("layer2", std::make_shared<Affine>(seed + 10, 20, 30))),
        layer3(register_module("layer3",
                               std::make_shared<Affine>(seed + 20, 30, 10, at::kBFloat16))) {}
  at::Tensor forward(const at::Tensor& x) {
    return layer3->forward(at::relu(layer2->forward(at::relu(layer1->forward(x)))));
  }
  std::shared_ptr<Affine> layer1, layer2, layer3;
};

/// One parameter w; forward(x) = x * w, w expanded.
class Scale : public torch::nn::Module {
 public:
  explicit Scale(const at::Tensor& value) : weight(register_parameter("weight", value.clone())) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};

}  // namespace tessera::test
