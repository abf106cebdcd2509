#include "models/decoder.h"

#include <algorithm>
#include <utility>

#include "models/context/context_inputs.h"
#include "models/family.h"
#include "nn/loss.h"
#include "nn/parameter.h"
#include "parallel/transitions.h"
#include "tessera/error.h"

namespace tessera::models {

std::shared_ptr<nn::Linear> add_lm_head(torch::nn::Module& head, const ModelSpec& spec,
                                        const nn::TensorRegion& region) {
  auto lm_head = nn::add_projection(head, "lm_head",
                                    {spec.hidden_size, region.part_of(spec.vocab_size),
                                     nn::WeightName::kOwn, nn::column_parallel(region)});
  lm_head->form_weight_gradient_at_once();
  return lm_head;
}

at::Tensor logits_or_loss(nn::Linear& lm_head, const nn::TensorRegion& region, const at::Tensor& x,
                          const std::optional<at::Tensor>& targets, const LogitsOptions& options) {
  at::Tensor logits = lm_head.forward(region.enter(x));
  const auto& cap = options.cap;
  if (options.divisor != 1.0) logits = logits / options.divisor;
  if (cap) logits = nn::soft_cap(logits, *cap);
  if (!targets) {
    return parallel::all_gather(logits, region.axis(), {2}, parallel::To::kInvariant, "logits");
  }
  // The cap's derivative is computed from the capped logits: they may not be consumed.
  return nn::vocab_parallel_cross_entropy_sum(
      logits, *targets,
      {.axis = region.axis(), .use = cap ? nn::Logits::kKeep : nn::Logits::kConsume});
}

DecoderHead::DecoderHead(const ModelSpec& spec, const LocalSizes& sizes)
    : region_(sizes.axes.tensor) {
  norm_ = register_module("norm", decoder_norm(spec, region_));
  lm_head_ = add_lm_head(*this, spec, region_);
  if (spec.granite) logits_.divisor = spec.granite->logits_scaling;
}

at::Tensor DecoderHead::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  return logits_or_loss(*lm_head_, region_, norm_->forward(x), targets, logits_);
}

Decoder::Decoder(const ModelSpec& spec, const ModelAxes& axes) : TextModel(spec, axes) {
  const DecoderNames& names = traits(spec.family).names;
  auto model = register_module(names.stem, std::make_shared<Prefix>());
  const LocalSizes sizes = local_sizes(spec, axes);
  if (needs_embedding()) {
    const auto padding =
        traits(spec.family).pads_embedding ? spec.pad_token_id : std::optional<std::int64_t>();
    const auto embedding =
        std::make_shared<nn::Embedding>(sizes.vocab_size, spec.hidden_size, padding, axes.tensor);
    model->register_module(names.embedding, embedding);
    embedding_.emplace(embedding);
  }
  const auto rope = std::make_shared<nn::Rope>(spec.rope, spec.head_dim);
  const auto sliding_rope =
      spec.sliding_rope ? std::make_shared<nn::Rope>(*spec.sliding_rope, spec.head_dim) : rope;
  // Every pair's angle is 0: heads are laid out as others', and nothing turns.
  const auto no_rope =
      std::make_shared<nn::Rope>(nn::RopeOptions{.partial_rotary_factor = 0.0}, spec.head_dim);
  const auto rope_of = [&](std::int64_t number) {
    if (!traits(spec.family).rope || !spec.has_rope(number)) return no_rope;
    return spec.is_sliding(number) ? sliding_rope : rope;
  };
  add_layers(*model, "layers", [&](std::int64_t number) {
    return std::make_shared<DecoderLayer>(spec, number, sizes, rope_of(number));
  });
  if (!has_head(stages_)) return;
  // The head is a unit, not a name: its parts are registered where Hugging Face has them.
  const auto head = std::make_shared<DecoderHead>(spec, sizes);
  model->register_module(names.norm, head->norm());
  register_module("lm_head", head->lm_head());
  if (ties_head()) nn::tie(head->lm_head()->weight, embedding_->module()->weight);
  head_.emplace(head);
}

at::Tensor Decoder::forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& targets) {
  ModelInputs inputs;
  inputs.input_ids = input_ids;
  inputs.targets = targets;
  return LanguageModel::forward(inputs);
}

ModelOutput Decoder::forward_stage(const StageInputs& inputs) {
  const ModelInputs& whole = inputs.batch;
  TESSERA_CHECK(!whole.images, ErrorKind::kFormat,
                "pixel_values: found images, expected none for a model of text");
  if (whole.documents.are_packed()) nn::check_documents(whole.documents.starts, whole.input_ids);
  const ModelInputs batch = own_inputs(whole, context_rows(whole));
  const ContextSamples samples(batch.documents);
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
    RoutingRequest request{std::nullopt, batch.router_statistics, fillers_by_token(batch)};
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
  if (spec_.granite) return embedded * spec_.granite->embedding_multiplier;
  return traits(spec_.family).scaled_embedding ? nn::scaled_by_root(embedded) : embedded;
}

at::Tensor Decoder::embedded_text(const at::Tensor& input_ids, std::int64_t /*before*/) {
  return into_layers(embedding_->module()->forward(input_ids));
}

std::vector<ModelUnit> Decoder::units() {
  const DecoderNames& names = traits(spec_.family).names;
  return text_units(concat(names.stem, ".", names.embedding), concat(names.stem, ".layers."));
}

std::string Decoder::canonical_name(const std::string& unit, const std::string& path) const {
  if (unit != kHeadUnit) return unit + "." + path;
  constexpr std::string_view kNorm = "norm";
  if (!path.starts_with("norm.")) return path;
  const DecoderNames& names = traits(spec_.family).names;
  return concat(names.stem, ".", names.norm, std::string_view(path).substr(kNorm.size()));
}

std::shared_ptr<LanguageModel> build_decoder(const ModelSpec& spec, const ModelAxes& axes) {
  return std::make_shared<Decoder>(spec, axes);
}

}  // namespace tessera::models
