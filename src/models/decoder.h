// The decoder-only language model of all dense families: embedding, equal layers, norm and head.
//
// Its parameters carry Hugging Face's names (a test compares them with parameter_table). Embedding,
// layers and head are reached through fsdp::Slot, so that each can become a sharding unit; the head
// unit is norm, output projection and loss together, a grouping that the names do not show. Short
// symbols: B rows, T positions, V vocabulary. Next: fsdp/slot.h, nn/attention.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/slot.h"
#include "models/model_spec.h"
#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"

namespace tessera::models {

class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const ModelSpec& spec, std::shared_ptr<nn::Rope> rope);
  /// x [B, T, hidden] -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x);

 private:
  std::shared_ptr<nn::Attention> self_attn_;
  std::shared_ptr<nn::Mlp> mlp_;
  std::shared_ptr<nn::RmsNorm> input_layernorm_, post_attention_layernorm_;
};

/// Final norm, output projection and, if asked, the loss.
class DecoderHead : public torch::nn::Module {
 public:
  explicit DecoderHead(const ModelSpec& spec);
  /// x [B, T, hidden], targets [B, T] i64 -> logits [B, T, V], or with targets the sum of losses,
  /// [] fp32.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& targets);

  const std::shared_ptr<nn::RmsNorm>& norm() const { return norm_; }
  const std::shared_ptr<nn::Linear>& lm_head() const { return lm_head_; }

 private:
  std::shared_ptr<nn::RmsNorm> norm_;
  std::shared_ptr<nn::Linear> lm_head_;
};

class Decoder : public torch::nn::Module {
 public:
  explicit Decoder(const ModelSpec& spec);

  /// input_ids, targets [B, T] i64 -> logits [B, T, V] in the head's input dtype, or with targets
  /// the sum of the token losses (nn/loss.h), [] fp32, without a wider copy of the logits.
  at::Tensor forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& targets);
  at::Tensor logits(const at::Tensor& input_ids) { return forward(input_ids, std::nullopt); }
  at::Tensor loss_sum(const at::Tensor& input_ids, const at::Tensor& targets) {
    return forward(input_ids, targets);
  }

  const ModelSpec& spec() const { return spec_; }
  fsdp::Slot<nn::Embedding>& embedding() { return *embedding_; }
  std::vector<fsdp::Slot<DecoderLayer>>& layers() { return layers_; }
  fsdp::Slot<DecoderHead>& head() { return *head_; }

 private:
  ModelSpec spec_;
  std::optional<fsdp::Slot<nn::Embedding>> embedding_;
  std::vector<fsdp::Slot<DecoderLayer>> layers_;
  std::optional<fsdp::Slot<DecoderHead>> head_;
};

/// The Hugging Face name of a unit's parameter: `unit` as in parameter_table ("model.embed_tokens",
/// "model.layers.3", "head"), `path` inside the unit's module ("norm.weight" of the head is
/// "model.norm.weight").
std::string parameter_name(const std::string& unit, const std::string& path);

}  // namespace tessera::models
