// GPT-2: embedding with learned positions, layers, LayerNorm and head.
//
// Its parameters carry the names of published files (description.h reads them there). Embedding and
// head are units, not names, where the two are not tied: the first is tokens and positions, the
// last norm, output projection and loss. Short symbols: B rows, T positions, V vocabulary. Next:
// ../text_model.h, gpt2_layer.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/context/context_inputs.h"
#include "models/decoder.h"
#include "models/gpt2/gpt2_layer.h"
#include "models/text_model.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kEmbeddingUnit = "embedding";

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

class Gpt2Model : public TextModel<Gpt2Embedding, Gpt2Layer, Gpt2Head> {
 public:
  Gpt2Model(const ModelSpec& spec, const ModelAxes& axes);

  /// Errors: kFormat for images, or for rows longer than the learned positions.
  ModelOutput forward_stage(const StageInputs& inputs) override;

  std::vector<ModelUnit> units() override { return text_units(kEmbeddingUnit, "h."); }
  std::string canonical_name(const std::string& unit, const std::string& path) const override {
    return unit == kEmbeddingUnit || unit == kHeadUnit ? path : unit + "." + path;
  }

 private:
  at::Tensor embedded_text(const at::Tensor& input_ids, std::int64_t before) override {
    return embedding_->module()->at(input_ids, before);
  }
};

/// Positions that need a row of their own; on a device documents are taken for whole rows.
std::int64_t longest_text(const at::Tensor& ids, std::int64_t first,
                          const nn::Documents& documents) {
  const at::Tensor& starts = documents.starts;
  if (!documents.are_packed() || !starts.is_cpu() || starts.numel() == 0) {
    return first + documents.positions(ids);
  }
  const at::Tensor own = at::arange(starts.size(1), starts.options()) - starts;
  return own.max().item<std::int64_t>() + 1;
}

LearnedPositions::LearnedPositions(std::int64_t positions, std::int64_t size,
                                   const nn::TensorRegion& region)
    : region_(region) {
  weight = add_parameter("weight", {positions, size},
                         {.layout = region.on_stream(), .decay = DecayClass::kEmbedding});
}

at::Tensor LearnedPositions::add_to(const at::Tensor& x, std::int64_t first,
                                    const nn::Documents& documents) const {
  const bool cut = region_.size() > 1 && region_.sequence() == SequenceParallel::kYes;
  const std::int64_t begin = cut ? region_.rank() * x.size(1) : 0;
  if (!documents.are_packed() && !documents.are_shared()) {
    return x + weight.narrow(0, first + begin, x.size(1)).to(x.scalar_type());
  }
  const std::int64_t all = documents.are_shared() ? 0 : first + begin + x.size(1);
  at::Tensor own = nn::places_of(documents, all, x.device()).narrow(0, first + begin, x.size(1));
  if (documents.are_packed()) {
    own = own - nn::own_places(documents.starts, 1, documents.context.get())
                    .narrow(1, first + begin, x.size(1));
  }
  const at::Tensor rows = weight.index_select(0, own.reshape({-1})).to(x.scalar_type());
  return x + rows.view({own.dim() == 1 ? 1 : x.size(0), x.size(1), x.size(2)});
}

Gpt2Embedding::Gpt2Embedding(const ModelSpec& spec, const nn::TensorRegion& region) {
  // No padding: transformers' embedding of this family has none for any pad_token_id.
  wte_ = register_module(
      "wte", std::make_shared<nn::Embedding>(region.part_of(spec.vocab_size), spec.hidden_size,
                                             std::nullopt, region));
  wpe_ = register_module("wpe", std::make_shared<LearnedPositions>(spec.max_position_embeddings,
                                                                   spec.hidden_size, region));
}

at::Tensor Gpt2Embedding::at(const at::Tensor& ids, std::int64_t first,
                             const nn::Documents& documents) const {
  const std::int64_t longest = longest_text(ids, first, documents);
  TESSERA_CHECK(longest <= wpe_->weight.size(0), ErrorKind::kFormat, "input_ids: found rows of ",
                longest,
                " positions, expected at most the model's n_positions = ", wpe_->weight.size(0));
  return wpe_->add_to(wte_->forward(ids), first, documents);
}

Gpt2Head::Gpt2Head(const ModelSpec& spec, const nn::TensorRegion& region) : region_(region) {
  ln_f_ = register_module(
      "ln_f", std::make_shared<LayerNorm>(spec.hidden_size, spec.rms_norm_eps, region.on_stream()));
  lm_head_ = add_lm_head(*this, spec, region);
}

at::Tensor Gpt2Head::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  return logits_or_loss(*lm_head_, region_, ln_f_->forward(x), targets);
}

Gpt2Model::Gpt2Model(const ModelSpec& spec, const ModelAxes& axes) : TextModel(spec, axes) {
  if (needs_embedding()) {
    const auto embedding = std::make_shared<Gpt2Embedding>(spec, axes.tensor);
    register_module("wte", embedding->wte());
    if (has_embedding(stages_)) register_module("wpe", embedding->wpe());
    embedding_.emplace(embedding);
  }
  add_layers(*this, "h",
             [&](std::int64_t number) { return std::make_shared<Gpt2Layer>(spec, number, axes); });
  if (!has_head(stages_)) return;
  const auto head = std::make_shared<Gpt2Head>(spec, axes.tensor);
  register_module("ln_f", head->norm());
  register_module("lm_head", head->lm_head());
  if (ties_head()) nn::tie(head->lm_head()->weight, embedding_->module()->wte()->weight);
  head_.emplace(head);
}

ModelOutput Gpt2Model::forward_stage(const StageInputs& inputs) {
  const ModelInputs& whole = inputs.batch;
  TESSERA_CHECK(!whole.images && whole.imposed_routing.empty(), ErrorKind::kFormat,
                "batch: found images or routing, expected neither for GPT-2");
  const StageLayers& stage = stages_.at(inputs.stage);
  if (whole.documents.are_packed()) nn::check_documents(whole.documents.starts, whole.input_ids);
  const ModelInputs batch = own_inputs(whole, context_rows(whole));
  const ContextSamples samples(batch.documents);
  at::Tensor x = stage.embedding ? (*embedding_)(batch.input_ids, batch.documents) : inputs.x;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (stage.has_layer(numbers_[i])) x = layers_[i](x, batch.documents);
  }
  return {stage.head ? (*head_)(x, batch.targets) : std::move(x), {}};
}

}  // namespace

std::shared_ptr<LanguageModel> build_gpt2(const ModelSpec& spec, const ModelAxes& axes) {
  return std::make_shared<Gpt2Model>(spec, axes);
}

}  // namespace tessera::models
