// Gemma 4's vision tower: patches to hidden states to soft tokens, and the projector to the text.
//
// All patches of an image see each other; no patch sees padding. The tower's activations have the
// dtype that its first projection computes in; positions, pooling scale and standardization are
// fp32. The tower is frozen as a rule: without a parameter that requires grad it leaves no graph.
// Batches without images run. Short symbols: N images, P patches, M soft tokens of all images, H
// hidden of the tower. Next: ../patch_grid.h, ../../nn/rope.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "grad/slot.h"
#include "models/description.h"
#include "models/language_model.h"
#include "models/model_spec.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "nn/parameter.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"

namespace tessera::models {

/// The patches' pixels and places.
class Gemma4PatchEmbedder : public nn::PlacedModule {
 public:
  explicit Gemma4PatchEmbedder(const Gemma4Vision& vision);
  /// pixel_values [N, P, 3*patch^2], position_ids [N, P, 2] -> [N, P, H] in the compute dtype.
  at::Tensor forward(const at::Tensor& pixel_values, const at::Tensor& position_ids);

 private:
  std::shared_ptr<nn::Linear> input_proj_;
  at::Tensor position_embedding_table_;  // [2, positions, H]: x, then y
};

class Gemma4VisionAttention : public torch::nn::Module {
 public:
  explicit Gemma4VisionAttention(const Gemma4Vision& vision);
  at::Tensor forward(const at::Tensor& x, const nn::AxialTable& table, const at::Tensor& visible);

 private:
  std::int64_t heads_, kv_heads_, head_dim_;
  double eps_;
  std::shared_ptr<nn::Linear> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<nn::RmsNorm> q_norm_, k_norm_;
};

class Gemma4VisionLayer : public torch::nn::Module {
 public:
  explicit Gemma4VisionLayer(const Gemma4Vision& vision);
  /// x [N, P, H]; visible [N, 1, P] bool: patches that are no padding.
  at::Tensor forward(const at::Tensor& x, const nn::AxialTable& table, const at::Tensor& visible);
  void set_recompute(RecomputeMode mode) { recompute_ = mode; }

 private:
  at::Tensor body(const at::Tensor& x, const nn::AxialTable& table, const at::Tensor& visible);

  std::shared_ptr<Gemma4VisionAttention> self_attn_;
  std::shared_ptr<nn::GegluMlp> mlp_;
  std::shared_ptr<nn::RmsNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<nn::RmsNorm> pre_feedforward_layernorm_, post_feedforward_layernorm_;
  RecomputeMode recompute_ = RecomputeMode::kNone;
};

class Gemma4VisionTower : public torch::nn::Module, public IsModelPart {
 public:
  explicit Gemma4VisionTower(const Gemma4Vision& vision);
  ModelPart part() const override { return ModelPart::kVision; }
  /// -> [M, H]. Errors: kFormat as patch_grid, or for pixels that do not fit the positions.
  at::Tensor forward(const Images& images);
  std::vector<ModelUnit> units();
  /// Sets the mode of its layers.
  void set_recompute(RecomputeMode mode);

 private:
  at::Tensor pool(const at::Tensor& h, const at::Tensor& patches) const;

  Gemma4Vision vision_;
  grad::Slot<Gemma4PatchEmbedder> patch_embedder_;
  std::vector<grad::Slot<Gemma4VisionLayer>> layers_;
  at::Tensor std_bias_, std_scale_;  // [H], buffers; undefined unless standardized
};

/// From the tower's soft tokens to embeddings of the text.
class Gemma4Projector : public torch::nn::Module, public IsModelPart {
 public:
  Gemma4Projector(const Gemma4Vision& vision, std::int64_t text_hidden_size);
  ModelPart part() const override { return ModelPart::kVision; }
  /// [M, H] -> [M, hidden of the text] in the same dtype.
  at::Tensor forward(const at::Tensor& soft_tokens);

 private:
  double eps_;
  std::shared_ptr<nn::Linear> embedding_projection_;
};

}  // namespace tessera::models
