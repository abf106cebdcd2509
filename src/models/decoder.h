// The decoder-only language model of all families without a module of their own: embedding, layers,
// norm and head.
//
// Its parameters carry Hugging Face's names (description.h reads them there). Embedding,
// layers and head are reached through grad::Slot, so that each can become a sharding unit; the head
// unit is norm, output projection and loss together, a grouping that the names do not show. Short
// symbols: B rows, T positions, V vocabulary. Next: decoder_layer.h, ../grad/slot.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "grad/slot.h"
#include "models/decoder_layer.h"
#include "models/language_model.h"
#include "models/model_spec.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"

namespace tessera::models {

/// Final norm, output projection and, if asked, the loss.
class DecoderHead : public torch::nn::Module {
 public:
  DecoderHead(const ModelSpec& spec, const LocalSizes& sizes);
  /// x [B, T, hidden] of the stream, targets [B, T] i64 -> logits [B, T, V], or with targets the
  /// sum of losses, [] fp32.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& targets);

  const std::shared_ptr<nn::RmsNorm>& norm() const { return norm_; }
  const std::shared_ptr<nn::Linear>& lm_head() const { return lm_head_; }

 private:
  nn::TensorRegion region_;
  std::shared_ptr<nn::RmsNorm> norm_;
  std::shared_ptr<nn::Linear> lm_head_;
};

class Decoder : public LanguageModel, public WritesText {
 public:
  explicit Decoder(const ModelSpec& spec, const ModelAxes& axes = {});

  using LanguageModel::forward;
  /// Errors: kFormat for images, or for imposed routing of another number of layers.
  ModelOutput forward_stage(const StageInputs& inputs) override;

  /// input_ids, targets [B, T] i64 -> logits [B, T, V] in the head's input dtype, or with targets
  /// the sum of the token losses (nn/loss.h), [] fp32, without a wider copy of the logits.
  at::Tensor forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& targets);
  at::Tensor logits(const at::Tensor& input_ids) { return forward(input_ids, std::nullopt); }
  at::Tensor loss_sum(const at::Tensor& input_ids, const at::Tensor& targets) {
    return forward(input_ids, targets);
  }

  WritesText* writer() override { return this; }
  bool can_decode() const override;
  DecoderCache make_cache(std::int64_t capacity) const override;
  at::Tensor decode(const at::Tensor& input_ids, DecoderCache& cache) override;
  at::Tensor next_logits(const at::Tensor& input_ids) override;

  std::vector<ModelUnit> units() override;
  std::string canonical_name(const std::string& unit, const std::string& path) const override;
  const ModelSpec& spec() const override { return spec_; }
  const StagesOfRank& stages() const override { return stages_; }
  void set_recompute(RecomputeMode mode) override;
  grad::Slot<nn::Embedding>& embedding() { return *embedding_; }
  std::vector<grad::Slot<DecoderLayer>>& layers() { return layers_; }
  grad::Slot<DecoderHead>& head() { return *head_; }

 private:
  /// The embedding's result as the first layer takes it.
  at::Tensor into_layers(const at::Tensor& embedded) const;

  ModelSpec spec_;
  StagesOfRank stages_;
  std::optional<grad::Slot<nn::Embedding>> embedding_;  // none where no stage here has it
  std::vector<std::int64_t> numbers_;                   // of layers_, in the model
  std::vector<grad::Slot<DecoderLayer>> layers_;
  std::optional<grad::Slot<DecoderHead>> head_;  // none where no stage here has it
};

}  // namespace tessera::models
