// The decoder-only language model of all families without a module of their own: embedding, layers,
// norm and head.
//
// Its parameters carry Hugging Face's names (description.h reads them there). Short symbols: B
// rows, T positions, V vocabulary. Next: text_model.h, decoder_layer.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/decoder_layer.h"
#include "models/model_spec.h"
#include "models/text_model.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"

namespace tessera::models {

/// The output projection of a head, registered in it as "lm_head".
std::shared_ptr<nn::Linear> add_lm_head(torch::nn::Module& head, const ModelSpec& spec,
                                        const nn::TensorRegion& region);
/// How the projection becomes the logits.
struct LogitsOptions {
  double divisor = 1.0;
  std::optional<double> cap = std::nullopt;  ///< nn::soft_cap
};
/// The part of a head after its norm: normed x [B, T, hidden] of the stream, targets [B, T] i64 ->
/// logits [B, T, V], or with targets the sum of losses, [] fp32.
at::Tensor logits_or_loss(nn::Linear& lm_head, const nn::TensorRegion& region, const at::Tensor& x,
                          const std::optional<at::Tensor>& targets,
                          const LogitsOptions& options = {});

/// Final norm, output projection and, if asked, the loss.
class DecoderHead : public torch::nn::Module {
 public:
  DecoderHead(const ModelSpec& spec, const LocalSizes& sizes);
  /// x [B, T, hidden] of the stream -> as logits_or_loss.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& targets);

  const std::shared_ptr<nn::RmsNorm>& norm() const { return norm_; }
  const std::shared_ptr<nn::Linear>& lm_head() const { return lm_head_; }

 private:
  nn::TensorRegion region_;
  std::shared_ptr<nn::RmsNorm> norm_;
  std::shared_ptr<nn::Linear> lm_head_;
  LogitsOptions logits_;
};

class Decoder : public TextModel<nn::Embedding, DecoderLayer, DecoderHead> {
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

  std::vector<ModelUnit> units() override;
  std::string canonical_name(const std::string& unit, const std::string& path) const override;

 private:
  at::Tensor embedded_text(const at::Tensor& input_ids, std::int64_t before) override;
  /// The embedding's result as the first layer takes it.
  at::Tensor into_layers(const at::Tensor& embedded) const;
};

}  // namespace tessera::models
