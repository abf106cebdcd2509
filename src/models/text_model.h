// TextModel: the common part of models of an embedding, layers of text and a head: the slots that
// hold them, their units, and how a text is written with them. Private to the models' sources.
//
// Embedding, layers and head are reached through grad::Slot, so that each can become a unit;
// writing calls them past any handle. A family derives from it, builds its parts under its own
// names, and defines how they compute a stage. Short symbols: B rows, T positions, H hidden. Next:
// decoder.h, language_model.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "grad/slot.h"
#include "models/language_model.h"
#include "models/model_spec.h"
#include "models/stage_layers.h"
#include "tessera/error.h"

namespace tessera::models {

template <class Embedding, class Layer, class Head>
class TextModel : public LanguageModel, public WritesText {
 public:
  WritesText* writer() override { return this; }

  DecoderCache make_cache(std::int64_t capacity) const override {
    return {std::vector<nn::KvCache>(layers_.size(), nn::KvCache(capacity))};
  }

  at::Tensor decode(const at::Tensor& input_ids, DecoderCache& cache) override {
    const at::NoGradGuard no_grad;
    if (cache.length() == 0) {
      require_whole(*this);
      ModelInputs prompt;
      prompt.input_ids = input_ids;
      check_own_values(prompt);
    }
    const std::int64_t end = cache.length() + input_ids.size(1);
    TESSERA_CHECK(
        !outgrows(spec_, cache.length(), end), ErrorKind::kUsage,
        "key-value cache: found a text of ", end, " positions in the cache of one of ",
        cache.length(),
        ", whose keys turn by the frequencies of short rows; decode the whole text into a "
        "new cache");
    TESSERA_INVARIANT(cache.layers.size() == layers_.size(), "a cache of another model");
    at::Tensor x = embedded_text(input_ids, cache.length());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      x = layers_[i].module()->decode(x, cache.layers[i]);
    }
    return logits_after(x);
  }

  at::Tensor next_logits(const at::Tensor& input_ids) override {
    const at::NoGradGuard no_grad;
    require_whole(*this);
    at::Tensor x = embedded_text(input_ids, 0);
    for (auto& layer : layers_) x = through(*layer.module(), x);
    return logits_after(x);
  }

  const ModelSpec& spec() const override { return spec_; }
  const StagesOfRank& stages() const override { return stages_; }
  const nn::ContextRegion& context() const override { return context_; }
  void set_recompute(RecomputeMode mode) override {
    for (auto& layer : layers_) layer.module()->set_recompute(mode);
  }

  grad::Slot<Embedding>& embedding() { return *embedding_; }
  std::vector<grad::Slot<Layer>>& layers() { return layers_; }
  grad::Slot<Head>& head() { return *head_; }

 protected:
  /// The head is norm, output projection and loss together, a grouping that names do not show.
  static constexpr const char* kHeadUnit = "head";

  TextModel(const ModelSpec& spec, const ModelAxes& axes)
      : spec_(spec), stages_(axes.stages_of(spec.num_hidden_layers)), context_(axes.context) {}

  /// Ids that follow `before` positions -> the first layer's input [B, T, H], past any handle.
  virtual at::Tensor embedded_text(const at::Tensor& input_ids, std::int64_t before) = 0;

  /// Whether the head is here and its matrix is the embedding's.
  bool ties_head() const { return spec_.tie_word_embeddings && has_head(stages_); }
  bool needs_embedding() const { return has_embedding(stages_) || ties_head(); }

  /// The layers of this rank under `name` of `parent`, each as `make` has it of its number.
  template <class Make>
  void add_layers(torch::nn::Module& parent, const std::string& name, Make make) {
    auto layers = parent.register_module(name, std::make_shared<Prefix>());
    for (std::int64_t i = 0; i < spec_.num_hidden_layers; ++i) {
      if (!has_layer(stages_, i)) continue;
      numbers_.push_back(i);
      layers_.emplace_back(layers->register_module(std::to_string(i), make(i)));
    }
  }

  /// Returns the units of this rank, in the order of forward; `layers` precedes a layer's number.
  std::vector<ModelUnit> text_units(const std::string& embedding, const std::string& layers) {
    std::vector<ModelUnit> units;
    const bool tied = spec_.tie_word_embeddings;
    if (embedding_ && !tied) units.push_back(unit_of(*embedding_, embedding));
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      units.push_back(unit_of(layers_[i], concat(layers, numbers_[i])));
    }
    if (head_ && !tied) units.push_back(unit_of(*head_, kHeadUnit));
    return units;
  }

  ModelSpec spec_;
  StagesOfRank stages_;
  nn::ContextRegion context_;
  std::optional<grad::Slot<Embedding>> embedding_;  // none where no stage here needs it
  std::vector<std::int64_t> numbers_;               // of layers_, in the model
  std::vector<grad::Slot<Layer>> layers_;
  std::optional<grad::Slot<Head>> head_;  // none where no stage here has it

 private:
  /// Nothing but text, and nothing asked of a router.
  static at::Tensor through(Layer& layer, const at::Tensor& x) {
    if constexpr (requires { layer.has_experts(); }) {
      return layer.forward(x, {}, {}).x;
    } else {
      return layer.forward(x, {});
    }
  }
  at::Tensor logits_after(const at::Tensor& x) {
    return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
  }
};

}  // namespace tessera::models
