// One text layer of Gemma 4: attention, then a dense MLP and in parallel a mixture of experts, each
// between two norms.
//
// Sliding and full layers differ in head size, key heads, rope and window; the positions after
// itself that a query sees (tokens of its image) are the same for all sliding layers. Short
// symbols: B rows, T positions, H hidden, M tokens, E experts, K experts a token. Next:
// ../moe_layer.h, whose experts these are, ../../nn/documents.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "models/decoder_layer.h"
#include "models/description.h"
#include "models/expert_bias.h"
#include "models/expert_tokens.h"
#include "models/model_spec.h"
#include "models/moe_layer.h"
#include "nn/documents.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "tessera/recompute_mode.h"

namespace tessera::models {

/// Gemma's norm: with its weight before the one rounding.
std::shared_ptr<nn::RmsNorm> gemma_norm(std::int64_t size, double eps, ParameterLayout layout = {});

/// The positions that are visible beyond plain causality and windows.
struct Gemma4Seen {
  nn::Documents documents = {};
  at::Tensor ends = {};  ///< as nn::AttentionMask has it; undefined: none after itself

  template <class F>
  void visit_tensors(F&& f) {
    documents.visit_tensors(f);
    if (ends.defined()) f(ends);
  }
};

class Gemma4Attention : public torch::nn::Module {
 public:
  Gemma4Attention(const ModelSpec& spec, const Gemma4Layer& layer, const nn::TensorRegion& region,
                  nn::ContextRegion context, std::shared_ptr<nn::Rope> rope);
  /// x [B, T, H] of the stream -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x, const Gemma4Seen& seen);
  /// As nn::TokenMixer::decode, of text.
  at::Tensor decode(const at::Tensor& x, nn::KvCache& cache);

 private:
  struct Heads {
    at::Tensor q, k, v;  ///< as nn::causal_attention takes them
  };
  Heads project(const at::Tensor& x, const nn::RopeTable& table);
  at::Tensor attend(const Heads& heads, const Gemma4Seen& seen) const;

  std::int64_t heads_;   // of this rank
  std::int64_t groups_;  // key heads of this rank
  Gemma4Layer layer_;
  std::optional<std::int64_t> window_;
  nn::TensorRegion region_;
  nn::ContextRegion context_;
  double eps_;
  std::shared_ptr<nn::Rope> rope_;
  std::shared_ptr<nn::Linear> q_proj_, k_proj_, v_proj_, o_proj_;  // no v_proj: values are keys
  std::shared_ptr<nn::RmsNorm> q_norm_, k_norm_;
};

/// Looks at the residual stream itself, normed without a weight; the experts see the stream through
/// a norm of their own.
class Gemma4Router : public nn::PlacedModule, public HasExpertBias, public IsModelPart {
 public:
  /// `number` of the layer.
  Gemma4Router(const ModelSpec& spec, std::int64_t number, const nn::TensorRegion& region);
  ModelPart part() const override { return ModelPart::kRouter; }
  /// x [M, H]; imposed as moe::route.
  moe::Routing forward(const at::Tensor& x, const std::optional<at::Tensor>& imposed);

 private:
  MoeSpec moe_;
  std::int64_t number_;
  double eps_;
  std::shared_ptr<nn::Linear> proj_;
  at::Tensor scale_;             // [H]
  at::Tensor per_expert_scale_;  // [E]
};

class Gemma4TextLayer : public torch::nn::Module, public IsLayer, public Recomputable {
 public:
  Gemma4TextLayer(const ModelSpec& spec, std::size_t number, const ModelAxes& axes,
                  std::shared_ptr<nn::Rope> rope);
  std::int64_t number() const override { return number_; }
  /// As DecoderLayer::forward.
  DecoderLayer::Output forward(const at::Tensor& x, const Gemma4Seen& seen,
                               const RoutingRequest& request);
  /// As DecoderLayer::decode, of text.
  at::Tensor decode(const at::Tensor& x, nn::KvCache& cache);
  bool has_experts() const { return router_ != nullptr; }

 private:
  using Output = DecoderLayer::Output;
  Output body(const at::Tensor& x, const Gemma4Seen& seen, const RoutingRequest& request);
  /// Returns the stream after attention.
  at::Tensor up_to_feed_forward(const at::Tensor& x, const Gemma4Seen& seen);
  Output behind_attention(const at::Tensor& middle, const RoutingRequest& request);
  Output feed_forward(const at::Tensor& x, const RoutingRequest& request);
  Output mixed(const at::Tensor& x, const RoutingRequest& request);

  std::int64_t number_;
  ExpertTokens tokens_;
  bool is_alone_;  // as DecoderLayer's
  std::shared_ptr<Gemma4Attention> self_attn_;
  std::shared_ptr<nn::GegluMlp> mlp_;
  std::shared_ptr<nn::RmsNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<nn::RmsNorm> pre_feedforward_layernorm_, post_feedforward_layernorm_;
  // Null without experts.
  std::shared_ptr<Gemma4Router> router_;
  std::shared_ptr<ExpertBank> experts_;
  std::shared_ptr<nn::RmsNorm> post_feedforward_layernorm_1_, post_feedforward_layernorm_2_;
  std::shared_ptr<nn::RmsNorm> pre_feedforward_layernorm_2_;
  at::Tensor layer_scalar_;  // [1], a buffer
};

}  // namespace tessera::models
