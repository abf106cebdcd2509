// The mixture of experts of a decoder layer: router, experts and, in some families, one more MLP
// that every token goes through.
//
// Its parameters carry Hugging Face's names, except for experts of which the files hold a tensor
// each: they are one parameter a product here (ParameterSpec::stacked). Short symbols: B rows, T
// positions, M tokens, H hidden, E experts, K experts a token, I inner. Next: ../moe/routing.h,
// ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "models/description.h"
#include "models/expert_bias.h"
#include "models/expert_tokens.h"
#include "models/model_axes.h"
#include "models/model_spec.h"
#include "moe/expert_adapter.h"
#include "moe/routing.h"
#include "nn/linear.h"
#include "nn/mlp.h"

namespace tessera::models {

/// Returns what was asked of the routing of the tokens that a router saw.
RouterLoad load_of(const moe::Routing& routing, RouterStatistics statistics,
                   const std::optional<at::Tensor>& fillers = std::nullopt);

/// Scores of all experts, those of other ranks too.
class ExpertRouter : public nn::PlacedModule, public IsModelPart {
 public:
  /// `number` of the layer.
  ExpertRouter(const ModelSpec& spec, std::int64_t number, const nn::TensorRegion& region = {});
  ModelPart part() const override { return ModelPart::kRouter; }
  /// x [M, H] -> [M, E] in the dtype that the router computes in.
  at::Tensor scores(const at::Tensor& x) const;
  /// `imposed` as RoutingRequest has it; `bias` [E] on the choice where the router has none of its
  /// own, or undefined.
  moe::Routing route(const at::Tensor& scores, const std::optional<at::Tensor>& imposed,
                     const at::Tensor& bias = {}) const;

 private:
  MoeSpec moe_;
  std::int64_t number_;
  at::Tensor weight_;       // [E, H]
  at::Tensor bias_;         // [E], or undefined
  at::Tensor stored_bias_;  // [E] fp32 (MoeSpec::has_stored_bias), else undefined
};

/// The weights of a rank's experts, one tensor a product.
class ExpertBank : public nn::PlacedModule, public IsModelPart {
 public:
  ExpertBank(const ModelSpec& spec, const LocalSizes& sizes);
  ModelPart part() const override { return ModelPart::kExperts; }
  /// x [M, H] -> [M, H] in x's dtype.
  /// `meanwhile`: moe::ExpertOptions.
  at::Tensor forward(const at::Tensor& x, const moe::Routing& routing,
                     std::function<void()> meanwhile = {});
  /// Adds the parameters PRODUCT.lora_A.weight [E, rank, in] and PRODUCT.lora_B.weight [E, out,
  /// rank] to a product of this bank ("gate_up_proj", without a gate "up_proj"; "down_proj"),
  /// before sharding.
  void add_adapter(const std::string& product, const nn::LoraOptions& options);
  /// The module's name in the model, for errors.
  void set_name(std::string name) { name_ = std::move(name); }

 private:
  void add_without_gate(std::int64_t count, std::int64_t hidden, std::int64_t inner);

  std::string name_ = "experts";
  MoeSpec moe_;
  Family family_;
  ModelAxes axes_;
  at::Tensor gate_up_proj_;  // without a gate "up_proj"
  at::Tensor gate_up_proj_bias_;
  at::Tensor down_proj_, down_proj_bias_;
  std::shared_ptr<moe::ExpertAdapter> gate_up_adapter_, down_adapter_;  // null without
};

class MoeLayer : public torch::nn::Module, public HasExpertBias {
 public:
  /// `number` of the layer.
  MoeLayer(const ModelSpec& spec, std::int64_t number, const LocalSizes& sizes);

  struct Output {
    at::Tensor x;
    RouterLoad load;
  };
  /// x [B, T, H] of the stream -> the same shape and dtype. Errors: as moe::route.
  Output forward(const at::Tensor& x, const RoutingRequest& request);

 private:
  /// The result of the shared experts: the stream, or an addend where the exit sums.
  at::Tensor shared(const at::Tensor& x, const at::Tensor& entered);

  ExpertTokens tokens_;
  std::shared_ptr<ExpertRouter> router_;
  std::shared_ptr<ExpertBank> experts_;
  std::shared_ptr<nn::Mlp> shared_experts_;  // null without
  std::shared_ptr<nn::Linear> shared_gate_;  // of their result; null without
};

}  // namespace tessera::models
