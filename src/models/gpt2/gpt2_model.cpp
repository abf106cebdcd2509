#include "models/gpt2/gpt2_model.h"

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "nn/loss.h"
#include "nn/parameter.h"
#include "parallel/transitions.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kEmbeddingUnit = "embedding";
constexpr const char* kGpt2HeadUnit = "head";

/// Positions that need a row of their own; on a device documents are taken for whole rows.
std::int64_t longest_text(const at::Tensor& ids, std::int64_t first,
                          const nn::Documents& documents) {
  const at::Tensor& starts = documents.starts;
  if (!documents.are_packed() || !starts.is_cpu() || starts.numel() == 0) {
    return first + ids.size(1);
  }
  const at::Tensor own = at::arange(starts.size(1), starts.options()) - starts;
  return own.max().item<std::int64_t>() + 1;
}

}  // namespace

LearnedPositions::LearnedPositions(std::int64_t positions, std::int64_t size,
                                   const nn::TensorRegion& region)
    : region_(region) {
  weight = add_parameter("weight", {positions, size},
                         {.layout = region.on_stream(), .decay = DecayClass::kEmbedding});
}

at::Tensor LearnedPositions::add_to(const at::Tensor& x, std::int64_t first,
                                    const nn::Documents& documents) const {
  const bool cut = region_.size() > 1 && region_.sequence() == SequenceParallel::kYes;
  const std::int64_t begin = first + (cut ? region_.rank() * x.size(1) : 0);
  if (!documents.are_packed()) {
    return x + weight.narrow(0, begin, x.size(1)).to(x.scalar_type());
  }
  const at::Tensor starts = documents.starts.narrow(1, begin, x.size(1));
  const at::Tensor own = at::arange(begin, begin + x.size(1), starts.options()) - starts;
  const at::Tensor rows = weight.index_select(0, own.reshape({own.numel()}));
  return x + rows.view(x.sizes()).to(x.scalar_type());
}

Gpt2Embedding::Gpt2Embedding(const ModelSpec& spec, const nn::TensorRegion& region) {
  // No padding: transformers' embedding of this family has none, whatever pad_token_id is.
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
  lm_head_ = nn::add_projection(*this, "lm_head",
                                {spec.hidden_size, region.part_of(spec.vocab_size),
                                 nn::WeightName::kOwn, nn::column_parallel(region)});
  lm_head_->form_weight_gradient_at_once();
}

at::Tensor Gpt2Head::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  const at::Tensor logits = lm_head_->forward(region_.enter(ln_f_->forward(x)));
  if (targets) {
    return nn::vocab_parallel_cross_entropy_sum(
        logits, *targets, {.axis = region_.axis(), .use = nn::Logits::kConsume});
  }
  return parallel::all_gather(logits, region_.axis(), {2}, parallel::To::kInvariant, "logits");
}

Gpt2Model::Gpt2Model(const ModelSpec& spec, const ModelAxes& axes)
    : spec_(spec), stages_(axes.stages_of(spec.num_hidden_layers)) {
  const bool tied_head = spec.tie_word_embeddings && has_head(stages_);
  if (has_embedding(stages_) || tied_head) {
    const auto embedding = std::make_shared<Gpt2Embedding>(spec, axes.tensor);
    register_module("wte", embedding->wte());
    if (has_embedding(stages_)) register_module("wpe", embedding->wpe());
    embedding_.emplace(embedding);
  }
  auto layers = register_module("h", std::make_shared<Prefix>());
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    if (!has_layer(stages_, i)) continue;
    numbers_.push_back(i);
    layers_.emplace_back(
        layers->register_module(std::to_string(i), std::make_shared<Gpt2Layer>(spec, i, axes)));
  }
  if (!has_head(stages_)) return;
  const auto head = std::make_shared<Gpt2Head>(spec, axes.tensor);
  register_module("ln_f", head->norm());
  register_module("lm_head", head->lm_head());
  if (tied_head) nn::tie(head->lm_head()->weight, embedding_->module()->wte()->weight);
  head_.emplace(head);
}

ModelOutput Gpt2Model::forward_stage(const StageInputs& inputs) {
  const ModelInputs& batch = inputs.batch;
  TESSERA_CHECK(!batch.images && batch.imposed_routing.empty(), ErrorKind::kFormat,
                "batch: found images or routing, expected neither for GPT-2");
  const StageLayers& stage = stages_.at(inputs.stage);
  if (batch.documents.are_packed()) nn::check_documents(batch.documents.starts, batch.input_ids);
  at::Tensor x = stage.embedding ? (*embedding_)(batch.input_ids, batch.documents) : inputs.x;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (stage.has_layer(numbers_[i])) x = layers_[i](x, batch.documents);
  }
  return {stage.head ? (*head_)(x, batch.targets) : std::move(x), {}};
}

DecoderCache Gpt2Model::make_cache(std::int64_t capacity) const {
  return {std::vector<nn::KvCache>(layers_.size(), nn::KvCache(capacity))};
}

at::Tensor Gpt2Model::next_logits(const at::Tensor& input_ids) {
  const at::NoGradGuard no_grad;
  require_whole(*this);
  at::Tensor x = embedding_->module()->forward(input_ids, {});
  for (auto& layer : layers_) x = layer.module()->forward(x);
  return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
}

at::Tensor Gpt2Model::decode(const at::Tensor& input_ids, DecoderCache& cache) {
  const at::NoGradGuard no_grad;
  if (cache.length() == 0) require_whole(*this);
  TESSERA_INVARIANT(cache.layers.size() == layers_.size(), "a cache of another model than GPT-2's");
  at::Tensor x = embedding_->module()->at(input_ids, cache.length());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    x = layers_[i].module()->decode(x, cache.layers[i]);
  }
  return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
}

std::vector<ModelUnit> Gpt2Model::units() {
  std::vector<ModelUnit> units;
  const bool tied = spec_.tie_word_embeddings;
  if (embedding_ && !tied) units.push_back(unit_of(*embedding_, kEmbeddingUnit));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    units.push_back(unit_of(layers_[i], concat("h.", numbers_[i])));
  }
  if (head_ && !tied) units.push_back(unit_of(*head_, kGpt2HeadUnit));
  return units;
}

void Gpt2Model::set_recompute(RecomputeMode mode) {
  for (auto& layer : layers_) layer.module()->set_recompute(mode);
}

std::string Gpt2Model::canonical_name(const std::string& unit, const std::string& path) const {
  return unit == kEmbeddingUnit || unit == kGpt2HeadUnit ? path : unit + "." + path;
}

std::shared_ptr<LanguageModel> build_gpt2(const ModelSpec& spec, const ModelAxes& axes) {
  return std::make_shared<Gpt2Model>(spec, axes);
}

}  // namespace tessera::models
