// Gemma 4: a vision tower whose soft tokens take the place of image tokens, and the text model.
//
// Its parameters carry Hugging Face's names (description.h reads them there). A text without images
// is a batch without them: the tower is then not entered. Short symbols: B rows, T positions, H
// hidden, V vocabulary. Next: gemma4_layer.h, gemma4_vision.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "grad/slot.h"
#include "models/gemma4/gemma4_layer.h"
#include "models/gemma4/gemma4_vision.h"
#include "models/language_model.h"
#include "nn/embedding.h"

namespace tessera::models {

/// Final norm, output projection, soft cap and, if asked, the loss.
class Gemma4Head : public torch::nn::Module {
 public:
  Gemma4Head(const ModelSpec& spec, const nn::TensorRegion& region);
  /// As DecoderHead::forward.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& targets);

  const std::shared_ptr<nn::RmsNorm>& norm() const { return norm_; }
  const std::shared_ptr<nn::Linear>& lm_head() const { return lm_head_; }

 private:
  std::optional<double> cap_;
  nn::TensorRegion region_;
  std::shared_ptr<nn::RmsNorm> norm_;
  std::shared_ptr<nn::Linear> lm_head_;
};

class Gemma4Model : public LanguageModel, public WritesText {
 public:
  explicit Gemma4Model(const ModelSpec& spec, const ModelAxes& axes = {});

  /// Errors: kFormat for images that do not fit the ids or the token types, or for as many images
  /// as the model has no tower for.
  ModelOutput forward_stage(const StageInputs& inputs) override;

  // Of text. Image tokens in the first call of a cache are refused on the CPU (kFormat); what stands
  // for no text is padding elsewhere, as in forward.
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

  // The steps of forward, for those who want to look in between.

  /// Soft tokens of all images, [M, H of the tower]. Errors: as Gemma4VisionTower::forward.
  at::Tensor soft_tokens(const Images& images);
  /// The first layer's input, [B, T, H] of the stream.
  at::Tensor embed(const ModelInputs& inputs);
  /// As its layers take it. With the documents of rows whose images lie in one each.
  Gemma4Seen seen(const ModelInputs& inputs) const;
  std::vector<grad::Slot<Gemma4TextLayer>>& layers() { return layers_; }
  grad::Slot<nn::Embedding>& embedding() { return *embedding_; }
  grad::Slot<Gemma4Head>& head() { return *head_; }
  const std::shared_ptr<Gemma4Projector>& projector() const { return projector_; }

 protected:
  void check_own_values(const ModelInputs& inputs) const override;

 private:
  /// Ids of what is no text are padding.
  at::Tensor text_ids(const at::Tensor& input_ids) const;
  void register_vision(torch::nn::Module& model);
  /// [B, T] bool: which tokens are images'.
  struct ImageTokens {
    at::Tensor are_images;
    at::Tensor on_host;
  };
  at::Tensor place(const at::Tensor& x, const ImageTokens& tokens,
                   const at::Tensor& projected) const;
  /// The image tokens as the host has read them. Text alone on a device is not looked at, and
  /// undefined: the host would have to wait for it (check_values).
  at::Tensor checked_images(const ModelInputs& inputs, const at::Tensor& image_tokens) const;

  ModelSpec spec_;
  nn::TensorRegion region_;
  StagesOfRank stages_;
  std::shared_ptr<Gemma4VisionTower> tower_;    // null for a text model, and behind the first stage
  std::shared_ptr<Gemma4Projector> projector_;  // likewise
  std::optional<grad::Slot<nn::Embedding>> embedding_;  // none where no stage here has it
  std::vector<std::size_t> numbers_;                    // of layers_, in the model
  std::vector<grad::Slot<Gemma4TextLayer>> layers_;
  std::optional<grad::Slot<Gemma4Head>> head_;  // none where no stage here has it
};

}  // namespace tessera::models
