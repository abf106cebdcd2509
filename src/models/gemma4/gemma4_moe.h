// The mixture of experts in Gemma 4's text layers.
//
// The router looks at the residual stream itself, normed without a weight; the experts see the
// stream through a norm of their own. Short symbols: M tokens, H hidden, E experts, K experts a
// token, I inner. Next: ../../moe/routing.h, ../../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>

#include "models/model_axes.h"
#include "models/model_spec.h"
#include "moe/routing.h"
#include "nn/linear.h"

namespace tessera::models {

class Gemma4Router : public nn::PlacedModule {
 public:
  Gemma4Router(const ModelSpec& spec, const Gemma4Experts& experts, const nn::TensorRegion& region);
  /// x [M, H]; imposed as moe::route.
  moe::Routing forward(const at::Tensor& x, const std::optional<at::Tensor>& imposed);

 private:
  std::int64_t experts_per_token_;
  double eps_;
  std::shared_ptr<nn::Linear> proj_;
  at::Tensor scale_;             // [H]
  at::Tensor per_expert_scale_;  // [E]
};

/// The weights of a rank's experts, one tensor a product.
class Gemma4ExpertBank : public nn::PlacedModule {
 public:
  Gemma4ExpertBank(const ModelSpec& spec, const Gemma4Experts& experts, const ModelAxes& axes);
  /// x [M, H] -> [M, H] in x's dtype.
  at::Tensor forward(const at::Tensor& x, const moe::Routing& routing);

 private:
  ModelAxes axes_;
  at::Tensor gate_up_proj_;  // [E, 2I, H]
  at::Tensor down_proj_;     // [E, H, I]
};

}  // namespace tessera::models
