#include "models/decoder.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "models/family.h"
#include "nn/loss.h"
#include "nn/parameter.h"
#include "parallel/transitions.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kHeadUnit = "head";

}  // namespace

DecoderHead::DecoderHead(const ModelSpec& spec, const LocalSizes& sizes)
    : region_(sizes.axes.tensor) {
  norm_ = register_module("norm", decoder_norm(spec, region_));
  lm_head_ = register_module(
      "lm_head", std::make_shared<nn::Linear>(spec.hidden_size, sizes.vocab_size, nn::Bias::kNo,
                                              nn::column_parallel(region_)));
  lm_head_->form_weight_gradient_at_once();
}

at::Tensor DecoderHead::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  const at::Tensor logits = lm_head_->forward(region_.enter(norm_->forward(x)));
  if (targets) {
    return nn::vocab_parallel_cross_entropy_sum(
        logits, *targets, {.axis = region_.axis(), .use = nn::Logits::kConsume});
  }
  return parallel::all_gather(logits, region_.axis(), {2}, parallel::To::kInvariant, "logits");
}

Decoder::Decoder(const ModelSpec& spec, const ModelAxes& axes)
    : spec_(spec), stages_(axes.stages_of(spec.num_hidden_layers)) {
  auto model = register_module("model", std::make_shared<Prefix>());
  const LocalSizes sizes = local_sizes(spec, axes);
  const bool tied_head = spec.tie_word_embeddings && has_head(stages_);
  if (has_embedding(stages_) || tied_head) {
    const auto embedding = std::make_shared<nn::Embedding>(sizes.vocab_size, spec.hidden_size,
                                                           spec.pad_token_id, axes.tensor);
    model->register_module("embed_tokens", embedding);
    embedding_.emplace(embedding);
  }
  auto layers = model->register_module("layers", std::make_shared<Prefix>());
  const auto rope = std::make_shared<nn::Rope>(spec.rope, spec.head_dim);
  const auto sliding_rope =
      spec.sliding_rope ? std::make_shared<nn::Rope>(*spec.sliding_rope, spec.head_dim) : rope;
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    if (!has_layer(stages_, i)) continue;
    numbers_.push_back(i);
    layers_.emplace_back(layers->register_module(
        std::to_string(i),
        std::make_shared<DecoderLayer>(spec, i, sizes, spec.is_sliding(i) ? sliding_rope : rope)));
  }
  if (!has_head(stages_)) return;
  // The head is a unit, not a name: its parts are registered where Hugging Face has them.
  const auto head = std::make_shared<DecoderHead>(spec, sizes);
  model->register_module("norm", head->norm());
  register_module("lm_head", head->lm_head());
  if (tied_head) nn::tie(head->lm_head()->weight, embedding_->module()->weight);
  head_.emplace(head);
}

at::Tensor Decoder::forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& targets) {
  ModelInputs inputs;
  inputs.input_ids = input_ids;
  inputs.targets = targets;
  return LanguageModel::forward(inputs);
}

ModelOutput Decoder::forward_stage(const StageInputs& inputs) {
  const ModelInputs& batch = inputs.batch;
  TESSERA_CHECK(!batch.images, ErrorKind::kFormat,
                "pixel_values: found images, expected none for a model of text");
  if (batch.documents.are_packed()) nn::check_documents(batch.documents.starts, batch.input_ids);
  const auto routed =
      batch.imposed_routing.empty() ? std::vector<std::int64_t>() : routed_experts(spec_).layers;
  TESSERA_CHECK(batch.imposed_routing.size() == routed.size(), ErrorKind::kFormat,
                "imposed routing: found ", batch.imposed_routing.size(),
                " layers, expected one of each of the ", routed.size(), " layers with experts");
  const StageLayers& stage = stages_.at(inputs.stage);
  ModelOutput output;
  at::Tensor x = stage.embedding ? into_layers((*embedding_)(batch.input_ids)) : inputs.x;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (!stage.has_layer(numbers_[i])) continue;
    RoutingRequest request{std::nullopt, batch.router_statistics};
    const auto place = std::ranges::find(routed, numbers_[i]);
    if (place != routed.end()) {
      request.imposed = batch.imposed_routing[static_cast<std::size_t>(place - routed.begin())];
    }
    auto [next, load] = layers_[i](x, request, batch.documents);
    x = std::move(next);
    if (load.counts.defined()) output.loads.push_back(std::move(load));
  }
  output.result = stage.head ? (*head_)(x, batch.targets) : std::move(x);
  return output;
}

at::Tensor Decoder::into_layers(const at::Tensor& embedded) const {
  return traits(spec_.family).scaled_embedding ? nn::scaled_by_root(embedded) : embedded;
}

bool Decoder::can_decode() const {
  return std::ranges::all_of(layers_,
                             [](const auto& layer) { return layer.module()->can_decode(); });
}

DecoderCache Decoder::make_cache(std::int64_t capacity) const {
  return {std::vector<nn::KvCache>(layers_.size(), nn::KvCache(capacity))};
}

at::Tensor Decoder::next_logits(const at::Tensor& input_ids) {
  const at::NoGradGuard no_grad;
  require_whole(*this);
  at::Tensor x = into_layers(embedding_->module()->forward(input_ids));
  for (auto& layer : layers_) x = layer.module()->forward(x, {}, {}).x;
  return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
}

at::Tensor Decoder::decode(const at::Tensor& input_ids, DecoderCache& cache) {
  const at::NoGradGuard no_grad;
  if (cache.length() == 0) require_whole(*this);
  TESSERA_INVARIANT(cache.layers.size() == layers_.size(), "a cache of another model");
  at::Tensor x = into_layers(embedding_->module()->forward(input_ids));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    x = layers_[i].module()->decode(x, cache.layers[i]);
  }
  return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
}

std::vector<ModelUnit> Decoder::units() {
  std::vector<ModelUnit> units;
  const bool tied = spec_.tie_word_embeddings;
  if (embedding_ && !tied) units.push_back(unit_of(*embedding_, "model.embed_tokens"));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    units.push_back(unit_of(layers_[i], concat("model.layers.", numbers_[i])));
  }
  if (head_ && !tied) units.push_back(unit_of(*head_, kHeadUnit));
  return units;
}

void Decoder::set_recompute(RecomputeMode mode) {
  for (auto& layer : layers_) layer.module()->set_recompute(mode);
}

std::string Decoder::canonical_name(const std::string& unit, const std::string& path) const {
  if (unit != kHeadUnit) return unit + "." + path;
  return path.starts_with("norm.") ? "model." + path : path;
}

std::shared_ptr<LanguageModel> build_decoder(const ModelSpec& spec, const ModelAxes& axes) {
  return std::make_shared<Decoder>(spec, axes);
}

}  // namespace tessera::models
