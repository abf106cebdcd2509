// GPT-2: embedding with learned positions, layers, LayerNorm and head.
//
// Its parameters carry the names of published files (description.h reads them there). Embedding and
// head are units, not names, where the two are not tied: the first is tokens and positions, the
// last norm, output projection and loss. Short symbols: B rows, T positions, V vocabulary. Next:
// gpt2_layer.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "grad/slot.h"
#include "models/gpt2/gpt2_layer.h"
#include "models/language_model.h"
#include "nn/embedding.h"
#include "nn/linear.h"

namespace tessera::models {

/// A row for each position.
class LearnedPositions : public nn::PlacedModule {
 public:
  LearnedPositions(std::int64_t positions, std::int64_t size, const nn::TensorRegion& region);
  /// x [B, T, size] of the stream, whose first position of all ranks is `first` -> x + their rows.
  at::Tensor add_to(const at::Tensor& x, std::int64_t first, const nn::Documents& documents) const;

  at::Tensor weight;  ///< [positions, size]

 private:
  nn::TensorRegion region_;
};

class Gpt2Embedding : public torch::nn::Module {
 public:
  Gpt2Embedding(const ModelSpec& spec, const nn::TensorRegion& region);
  /// ids [B, T] i64 of the positions from 0 on -> [B, T, hidden] of the stream. Errors: kFormat for
  /// more positions than there are.
  at::Tensor forward(const at::Tensor& ids, const nn::Documents& documents) {
    return at(ids, 0, documents);
  }
  at::Tensor at(const at::Tensor& ids, std::int64_t first,
                const nn::Documents& documents = {}) const;

  const std::shared_ptr<nn::Embedding>& wte() const { return wte_; }
  const std::shared_ptr<LearnedPositions>& wpe() const { return wpe_; }

 private:
  std::shared_ptr<nn::Embedding> wte_;
  std::shared_ptr<LearnedPositions> wpe_;
};

class Gpt2Head : public torch::nn::Module {
 public:
  Gpt2Head(const ModelSpec& spec, const nn::TensorRegion& region);
  /// As DecoderHead::forward.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& targets);

  const std::shared_ptr<LayerNorm>& norm() const { return ln_f_; }
  const std::shared_ptr<nn::Linear>& lm_head() const { return lm_head_; }

 private:
  nn::TensorRegion region_;
  std::shared_ptr<LayerNorm> ln_f_;
  std::shared_ptr<nn::Linear> lm_head_;
};

class Gpt2Model : public LanguageModel, public WritesText {
 public:
  explicit Gpt2Model(const ModelSpec& spec, const ModelAxes& axes = {});

  /// Errors: kFormat for images, or for rows longer than the learned positions.
  ModelOutput forward_stage(const StageInputs& inputs) override;

  WritesText* writer() override { return this; }
  bool can_decode() const override { return true; }
  DecoderCache make_cache(std::int64_t capacity) const override;
  at::Tensor decode(const at::Tensor& input_ids, DecoderCache& cache) override;
  at::Tensor next_logits(const at::Tensor& input_ids) override;

  std::vector<ModelUnit> units() override;
  std::string canonical_name(const std::string& unit, const std::string& path) const override;
  const ModelSpec& spec() const override { return spec_; }
  const StagesOfRank& stages() const override { return stages_; }
  void set_recompute(RecomputeMode mode) override;

 private:
  ModelSpec spec_;
  StagesOfRank stages_;
  std::optional<grad::Slot<Gpt2Embedding>> embedding_;  // none where no stage here has it
  std::vector<std::int64_t> numbers_;                   // of layers_, in the model
  std::vector<grad::Slot<Gpt2Layer>> layers_;
  std::optional<grad::Slot<Gpt2Head>> head_;  // none where no stage here has it
};

}  // namespace tessera::models
