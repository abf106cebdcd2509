#include "models/gemma4/gemma4_model.h"

#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/host_read.h"
#include "models/context/context_inputs.h"
#include "models/decoder.h"
#include "nn/documents.h"
#include "nn/parameter.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kText = "model.language_model.";
constexpr std::int64_t kImageType = 1;
constexpr std::int64_t kVideoType = 2;

}  // namespace

Gemma4Head::Gemma4Head(const ModelSpec& spec, const nn::TensorRegion& region)
    : cap_(spec.gemma4->final_logit_softcapping), region_(region) {
  norm_ =
      register_module("norm", gemma_norm(spec.hidden_size, spec.rms_norm_eps, region.on_stream()));
  lm_head_ = add_lm_head(*this, spec, region);
}

at::Tensor Gemma4Head::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  return logits_or_loss(*lm_head_, region_, norm_->forward(x), targets, {.cap = cap_});
}

Gemma4Model::Gemma4Model(const ModelSpec& spec, const ModelAxes& axes)
    : TextModel(spec, axes), region_(axes.tensor) {
  auto model = register_module("model", std::make_shared<Prefix>());
  if (has_embedding(stages_)) register_vision(*model);
  auto text = model->register_module("language_model", std::make_shared<Prefix>());
  if (needs_embedding()) {
    const auto embedding = std::make_shared<nn::Embedding>(
        region_.part_of(spec.vocab_size), spec.hidden_size, spec.pad_token_id, region_);
    text->register_module("embed_tokens", embedding);
    embedding_.emplace(embedding);
  }
  const Gemma4Spec& gemma = *spec.gemma4;
  std::shared_ptr<nn::Rope> ropes[2];  // of sliding layers, of full ones
  add_layers(*text, "layers", [&](std::int64_t i) {
    const auto number = static_cast<std::size_t>(i);
    const Gemma4Layer& layer = gemma.layers[number];
    auto& rope = ropes[layer.type == LayerType::kFull ? 1 : 0];
    if (!rope) {
      const nn::RopeOptions& kind = layer.type == LayerType::kFull ? gemma.full_rope : spec.rope;
      rope = std::make_shared<nn::Rope>(kind, layer.head_dim);
    }
    return std::make_shared<Gemma4TextLayer>(spec, number, axes, rope);
  });
  if (!has_head(stages_)) return;
  // The head is a unit, not a name: its parts are registered where Hugging Face has them.
  const auto head = std::make_shared<Gemma4Head>(spec, region_);
  text->register_module("norm", head->norm());
  register_module("lm_head", head->lm_head());
  if (ties_head()) nn::tie(head->lm_head()->weight, embedding_->module()->weight);
  head_.emplace(head);
}

void Gemma4Model::register_vision(torch::nn::Module& model) {
  if (!spec_.gemma4->vision) return;
  const Gemma4Vision& vision = *spec_.gemma4->vision;
  tower_ = model.register_module("vision_tower", std::make_shared<Gemma4VisionTower>(vision));
  projector_ = model.register_module("embed_vision",
                                     std::make_shared<Gemma4Projector>(vision, spec_.hidden_size));
  // Every rank makes all soft tokens.
  nn::declare_all(*tower_, region_.everywhere());
  nn::declare_all(*projector_, region_.everywhere());
}

at::Tensor Gemma4Model::soft_tokens(const Images& images) {
  TESSERA_CHECK(tower_ != nullptr, ErrorKind::kFormat,
                "pixel_values: found images, expected none for a model without vision_config");
  return tower_->forward(images);
}

at::Tensor Gemma4Model::checked_images(const ModelInputs& inputs,
                                       const at::Tensor& image_tokens) const {
  if (!image_tokens.is_cpu() && !inputs.images) return {};
  const std::vector<at::Tensor> read = comm::read_on_host(
      {image_tokens, inputs.token_types ? inputs.token_types->eq(kImageType) : at::Tensor()},
      "image tokens");
  if (inputs.token_types) {
    TESSERA_CHECK(inputs.token_types->sizes() == inputs.input_ids.sizes() && read[1].equal(read[0]),
                  ErrorKind::kFormat,
                  "mm_token_type_ids: found types that do not fit input_ids, expected 1 at every "
                  "image token (id ",
                  spec_.gemma4->image_token_id, ") and nowhere else");
  }
  if (inputs.images) return read[0];
  TESSERA_CHECK(!read[0].any().item<bool>(), ErrorKind::kFormat,
                "input_ids: found image tokens (id ", spec_.gemma4->image_token_id,
                ") without pixel_values, expected their images");
  return read[0];
}

void Gemma4Model::check_own_values(const ModelInputs& inputs) const {
  checked_images(inputs, inputs.input_ids.eq(spec_.gemma4->image_token_id));
}

at::Tensor Gemma4Model::place(const at::Tensor& x, const ImageTokens& tokens,
                              const at::Tensor& projected, const nn::ContextRows* rows) const {
  const at::Tensor& image_tokens = tokens.are_images;
  const at::Tensor places = comm::uploaded(
      tokens.on_host.reshape({image_tokens.numel()}).nonzero().squeeze(1), image_tokens.device());
  TESSERA_CHECK(places.size(0) == projected.size(0), ErrorKind::kFormat, "input_ids: found ",
                places.size(0), " image tokens (id ", spec_.gemma4->image_token_id, "), expected ",
                projected.size(0), ", as many as the images make");
  const bool cut = region_.size() > 1 && region_.sequence() == SequenceParallel::kYes;
  if (!cut && (rows == nullptr || rows->cut.ranks == 1)) {
    return x.reshape({image_tokens.numel(), x.size(2)})
        .index_copy(0, places, projected.to(x.scalar_type()))
        .view(x.sizes());
  }
  // All soft tokens where they go, the same on every rank; each takes those at its positions.
  const at::Tensor everywhere = at::zeros({image_tokens.numel(), x.size(2)}, x.options())
                                    .index_copy(0, places, projected.to(x.scalar_type()))
                                    .view({image_tokens.size(0), image_tokens.size(1), x.size(2)});
  const at::Tensor own = region_.into_stream(nn::own_places(everywhere, 1, rows));
  const at::Tensor here = nn::own_places(image_tokens, 1, rows)
                              .narrow(1, cut ? region_.rank() * x.size(1) : 0, x.size(1));
  return at::where(here.unsqueeze(2), own, x);
}

at::Tensor Gemma4Model::text_ids(const at::Tensor& input_ids) const {
  const Gemma4Spec& gemma = *spec_.gemma4;
  at::Tensor no_text = input_ids.eq(gemma.image_token_id);
  for (const auto& token : {gemma.video_token_id, gemma.audio_token_id}) {
    if (token) no_text = no_text.logical_or(input_ids.eq(*token));
  }
  return input_ids.masked_fill(no_text, spec_.pad_token_id.value_or(0));
}

at::Tensor Gemma4Model::embed(const ModelInputs& inputs) {
  const ModelInputs own = own_inputs(inputs, context_rows(inputs));
  const at::Tensor image_tokens = inputs.input_ids.eq(spec_.gemma4->image_token_id);
  const at::Tensor on_host = checked_images(inputs, image_tokens);
  // The tower first: the order of units is the same on every rank, with images or without.
  at::Tensor projected;
  if (inputs.images) projected = projector_->forward(soft_tokens(*inputs.images));
  const at::Tensor embedded = (*embedding_)(text_ids(own.input_ids));
  const at::Tensor x = nn::scaled_by_root(embedded);
  if (!projected.defined()) return x;
  return place(x, {image_tokens, on_host}, projected, own.documents.context.get());
}

Gemma4Seen Gemma4Model::seen(const ModelInputs& inputs) const {
  Gemma4Seen seen{inputs.documents};
  if (spec_.gemma4->image_attention == ImageAttention::kBothWays && inputs.token_types) {
    seen.ends = nn::ends_of_runs(
        inputs.token_types->eq(kImageType).logical_or(inputs.token_types->eq(kVideoType)),
        inputs.documents);
  }
  return seen;
}

ModelOutput Gemma4Model::forward_stage(const StageInputs& inputs) {
  const ModelInputs& whole = inputs.batch;
  TESSERA_CHECK(whole.imposed_routing.empty() ||
                    (spec_.moe && whole.imposed_routing.size() == spec_.gemma4->layers.size()),
                ErrorKind::kFormat, "imposed routing: found ", whole.imposed_routing.size(),
                " layers, expected one of each layer with experts");
  const StageLayers& stage = stages_.at(inputs.stage);
  ModelOutput output;
  const ModelInputs batch = own_inputs(whole, context_rows(whole));
  const ContextSamples samples(batch.documents);
  at::Tensor x = stage.embedding ? embed(whole) : inputs.x;
  if (whole.documents.are_packed()) nn::check_documents(whole.documents.starts, whole.input_ids);
  Gemma4Seen seen_by_all = seen(whole);
  seen_by_all.documents = batch.documents;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (!stage.has_layer(numbers_[i])) continue;
    RoutingRequest request{std::nullopt, batch.router_statistics, fillers_by_token(batch)};
    if (!batch.imposed_routing.empty()) {
      request.imposed = batch.imposed_routing[static_cast<std::size_t>(numbers_[i])];
    }
    auto [next, load] = layers_[i](x, seen_by_all, request);
    x = std::move(next);
    if (load.counts.defined()) output.loads.push_back(std::move(load));
  }
  output.result = stage.head ? (*head_)(x, batch.targets) : std::move(x);
  return output;
}

at::Tensor Gemma4Model::embedded_text(const at::Tensor& input_ids, std::int64_t /*before*/) {
  return nn::scaled_by_root(embedding_->module()->forward(text_ids(input_ids)));
}

std::vector<ModelUnit> Gemma4Model::units() {
  std::vector<ModelUnit> units;
  if (tower_) units = tower_->units();
  for (ModelUnit& unit : text_units(concat(kText, "embed_tokens"), concat(kText, "layers."))) {
    units.push_back(std::move(unit));
  }
  return units;
}

void Gemma4Model::set_recompute(RecomputeMode mode) {
  if (tower_) tower_->set_recompute(mode);
  TextModel::set_recompute(mode);
}

std::string Gemma4Model::canonical_name(const std::string& unit, const std::string& path) const {
  if (unit != kHeadUnit) return unit + "." + path;
  return path.starts_with("norm.") ? kText + path : path;
}

std::shared_ptr<LanguageModel> build_gemma4(const ModelSpec& spec, const ModelAxes& axes) {
  return std::make_shared<Gemma4Model>(spec, axes);
}

}  // namespace tessera::models
