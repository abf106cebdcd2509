// Gemma 4: a vision tower whose soft tokens take the place of image tokens, and the text model.
//
// Its parameters carry Hugging Face's names (description.h reads them there). A text without images
// is a batch without them: the tower is then not entered. Short symbols: B rows, T positions, H
// hidden, V vocabulary. Next: ../text_model.h, gemma4_layer.h, gemma4_vision.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/gemma4/gemma4_layer.h"
#include "models/gemma4/gemma4_vision.h"
#include "models/text_model.h"
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

/// Writes text: image tokens in the first call of a cache are refused on the CPU (kFormat);
/// elsewhere ids of no text are padding, as in forward.
class Gemma4Model : public TextModel<nn::Embedding, Gemma4TextLayer, Gemma4Head> {
 public:
  explicit Gemma4Model(const ModelSpec& spec, const ModelAxes& axes = {});

  /// Errors: kFormat for images that do not fit the ids or the token types, or for as many images
  /// as the model has no tower for.
  ModelOutput forward_stage(const StageInputs& inputs) override;

  std::vector<ModelUnit> units() override;
  std::string canonical_name(const std::string& unit, const std::string& path) const override;
  void set_recompute(RecomputeMode mode) override;

  // The steps of forward, for callers that need values in between.

  /// Soft tokens of all images, [M, H of the tower]. Errors: as Gemma4VisionTower::forward.
  at::Tensor soft_tokens(const Images& images);
  /// The first layer's input, own positions [B, n, H] of the stream.
  at::Tensor embed(const ModelInputs& inputs);
  /// Returns what whole rows see, as its layers take it. With the documents of rows whose images lie
  /// in one each.
  Gemma4Seen seen(const ModelInputs& inputs) const;
  const std::shared_ptr<Gemma4Projector>& projector() const { return projector_; }

 protected:
  void check_own_values(const ModelInputs& inputs) const override;

 private:
  at::Tensor embedded_text(const at::Tensor& input_ids, std::int64_t before) override;
  /// Ids of what is no text are padding.
  at::Tensor text_ids(const at::Tensor& input_ids) const;
  void register_vision(torch::nn::Module& model);
  /// [B, T] bool: which tokens are images'.
  struct ImageTokens {
    at::Tensor are_images;
    at::Tensor on_host;
  };
  at::Tensor place(const at::Tensor& x, const ImageTokens& tokens, const at::Tensor& projected,
                   const nn::ContextRows* rows) const;
  /// The image tokens as the host has read them. Text alone on a device is not looked at, and
  /// undefined: the host would have to wait for it (check_values).
  at::Tensor checked_images(const ModelInputs& inputs, const at::Tensor& image_tokens) const;

  nn::TensorRegion region_;
  std::shared_ptr<Gemma4VisionTower> tower_;    // null for a text model, and behind the first stage
  std::shared_ptr<Gemma4Projector> projector_;  // likewise
};

}  // namespace tessera::models
