// Linear: x W^T + b, computed in the weight's dtype, returned in the input's; with an adapter
// (lora.h) its part is added.
//
// Short symbols: B rows, T positions, K inputs, N outputs. Next: rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "nn/lora.h"

namespace tessera::nn {

/// x [..., K], weight [N, K], bias [N] or undefined -> [..., N] in x's dtype.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

enum class Bias : std::uint8_t { kNo, kYes };

class Linear : public torch::nn::Module {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, Bias with_bias = Bias::kNo);
  at::Tensor forward(const at::Tensor& x);

  /// Adds the parameters lora_A.weight [rank, in] and lora_B.weight [out, rank], before sharding.
  void add_adapter(const LoraOptions& options);

  at::Tensor weight;  ///< [out, in]
  at::Tensor bias;    ///< [out] or undefined

 private:
  std::shared_ptr<Linear> lora_a_, lora_b_;  // null without an adapter; hold parameters only
  LoraOptions lora_;
};

/// Where a projection's weight stands in the names of a model.
enum class WeightName : std::uint8_t {
  kOwn,    ///< "q_proj.weight"
  kInner,  ///< "q_proj.linear.weight", as in Gemma 4's vision tower
};

struct Projection {
  std::int64_t in = 0;
  std::int64_t out = 0;
  WeightName weight_name = WeightName::kOwn;
};

/// A Linear without bias that is registered under `name` of `parent`.
std::shared_ptr<Linear> add_projection(torch::nn::Module& parent, const std::string& name,
                                       const Projection& projection);

}  // namespace tessera::nn
