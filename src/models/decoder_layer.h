// One layer of a decoder-only model: attention, or a layer with a state, and an MLP or a mixture of
// experts, each after a norm and added to the residual stream; in some families only one of the
// two.
//
// Which of them a layer has is read off the spec's layer types and the FamilyTraits in
// decoder_layer.cpp. Short symbols: B rows, T positions. Next: ../nn/attention/attention.h,
// moe_layer.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "models/description.h"
#include "models/expert_tokens.h"
#include "models/model_axes.h"
#include "models/model_spec.h"
#include "models/moe_layer.h"
#include "nn/documents.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "nn/token_mixer.h"
#include "tessera/recompute_mode.h"

namespace tessera::models {

/// Makes the norm that a family has for attention and feed-forward, and before the head.
std::shared_ptr<nn::RmsNorm> decoder_norm(const ModelSpec& spec, const nn::TensorRegion& region);

class DecoderLayer : public torch::nn::Module, public IsLayer, public Recomputable {
 public:
  /// `number` from 0: layers of one model may differ.
  DecoderLayer(const ModelSpec& spec, std::int64_t number, const LocalSizes& sizes,
               std::shared_ptr<nn::Rope> rope);
  std::int64_t number() const override { return number_; }

  struct Output {
    at::Tensor x;
    RouterLoad load;

    /// As recomputed() passes it on: only what was asked for is a result.
    std::vector<at::Tensor> tensors() const;
    static Output of(const std::vector<at::Tensor>& tensors);

    template <class F>
    void visit_tensors(F&& f) {
      f(x);
      load.visit_tensors(f);
    }
  };
  /// x [B, T, hidden] of the stream -> the same shape and dtype. `request` has no effect in a layer
  /// without experts. Documents as nn::TokenMixer::forward.
  Output forward(const at::Tensor& x, const RoutingRequest& request,
                 const nn::Documents& documents = {});

  bool has_experts() const { return moe_ != nullptr; }
  /// As nn::TokenMixer::decode.
  at::Tensor decode(const at::Tensor& x, nn::KvCache& cache);

 private:
  void add_feed_forward(const ModelSpec& spec, const LocalSizes& sizes);
  bool has_feed_forward() const { return mlp_ || moe_; }
  Output body(const at::Tensor& x, const RoutingRequest& request, const nn::Documents& documents);
  void add_norms(const ModelSpec& spec, const nn::TensorRegion& region);
  /// Computes a layer without a feed-forward.
  at::Tensor behind_mixer_alone(const at::Tensor& x, const nn::Documents& documents);
  std::vector<at::Tensor> up_to_feed_forward(const at::Tensor& x, const nn::Documents& documents);
  std::vector<at::Tensor> behind_attention(const at::Tensor& x, const at::Tensor& attended);
  at::Tensor as_addend(const at::Tensor& half) const;
  /// `halves` as behind_attention() returns them.
  Output feed_forward(const std::vector<at::Tensor>& halves, const RoutingRequest& request);

  std::int64_t number_;
  std::shared_ptr<nn::TokenMixer> mixer_;  // null in a layer that is a feed-forward alone
  std::shared_ptr<nn::Mlp> mlp_;   // null in a layer with experts, or without a feed-forward
  std::shared_ptr<MoeLayer> moe_;  // null in a layer without
  // Null where the family has none there (NormPlacement).
  std::shared_ptr<nn::RmsNorm> before_attention_, after_attention_;
  std::shared_ptr<nn::RmsNorm> before_feed_forward_, after_feed_forward_;
  std::optional<double> addend_factor_;  // of what each half adds to the stream; none: 1
  bool is_alone_;     // ModelAxes::shares_no_layer: it communicates only for its experts
  bool feeds_alone_;  // the same of its feed-forward: ranks of cp share attention alone
};

}  // namespace tessera::models
