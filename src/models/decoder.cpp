#include "models/decoder.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "models/recomputed.h"
#include "models/rope_options.h"
#include "models/unit_of_slot.h"
#include "nn/loss.h"
#include "nn/parameter.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kHeadUnit = "head";

nn::AttentionOptions attention_options(const ModelSpec& spec) {
  using QkNorm = nn::AttentionOptions::QkNorm;
  return {.hidden_size = spec.hidden_size,
          .heads = spec.num_attention_heads,
          .kv_heads = spec.num_key_value_heads,
          .head_dim = spec.head_dim,
          .bias = spec.attention_bias ? nn::Bias::kYes : nn::Bias::kNo,
          .qk_norm = spec.qk_norm() ? QkNorm::kYes : QkNorm::kNo,
          .norm_eps = spec.rms_norm_eps};
}

}  // namespace

DecoderLayer::DecoderLayer(const ModelSpec& spec, std::shared_ptr<nn::Rope> rope) {
  self_attn_ = register_module(
      "self_attn", std::make_shared<nn::Attention>(attention_options(spec), std::move(rope)));
  mlp_ = register_module("mlp",
                         std::make_shared<nn::Mlp>(spec.hidden_size, spec.intermediate_size,
                                                   spec.mlp_bias ? nn::Bias::kYes : nn::Bias::kNo));
  const auto norm = [&](const char* name) {
    return register_module(name,
                           std::make_shared<nn::RmsNorm>(spec.hidden_size, spec.rms_norm_eps));
  };
  input_layernorm_ = norm("input_layernorm");
  post_attention_layernorm_ = norm("post_attention_layernorm");
}

at::Tensor DecoderLayer::forward(const at::Tensor& x) {
  return recomputed(*this, recompute_, {x},
                    [this](const std::vector<at::Tensor>& in) { return body(in[0]); });
}

at::Tensor DecoderLayer::body(const at::Tensor& x) {
  return after_attention(x, self_attn_->forward(input_layernorm_->forward(x)));
}

at::Tensor DecoderLayer::decode(const at::Tensor& x, nn::KvCache& cache) {
  return after_attention(x, self_attn_->decode(input_layernorm_->forward(x), cache));
}

at::Tensor DecoderLayer::after_attention(const at::Tensor& x, const at::Tensor& attended) {
  const auto [sum, normed] = post_attention_layernorm_->add_forward(x, attended);
  return sum + mlp_->forward(normed);
}

DecoderHead::DecoderHead(const ModelSpec& spec) {
  norm_ =
      register_module("norm", std::make_shared<nn::RmsNorm>(spec.hidden_size, spec.rms_norm_eps));
  lm_head_ =
      register_module("lm_head", std::make_shared<nn::Linear>(spec.hidden_size, spec.vocab_size));
}

at::Tensor DecoderHead::forward(const at::Tensor& x, const std::optional<at::Tensor>& targets) {
  const at::Tensor logits = lm_head_->forward(norm_->forward(x));
  if (!targets) return logits;
  return nn::cross_entropy_sum(logits, *targets, nn::Logits::kConsume);
}

Decoder::Decoder(const ModelSpec& spec) : spec_(spec) {
  TESSERA_CHECK(spec.family != Family::kGemma4, ErrorKind::kConfig,
                "config.json architectures: found Gemma4ForConditionalGeneration, expected a dense "
                "family here");
  auto model = register_module("model", std::make_shared<Prefix>());
  const auto embedding =
      std::make_shared<nn::Embedding>(spec.vocab_size, spec.hidden_size, spec.pad_token_id);
  model->register_module("embed_tokens", embedding);
  embedding_.emplace(embedding);
  auto layers = model->register_module("layers", std::make_shared<Prefix>());
  const auto rope = std::make_shared<nn::Rope>(rope_options(spec.rope, spec.head_dim));
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    layers_.emplace_back(
        layers->register_module(std::to_string(i), std::make_shared<DecoderLayer>(spec, rope)));
  }
  // The head is a unit, not a name: its parts are registered where Hugging Face has them.
  const auto head = std::make_shared<DecoderHead>(spec);
  model->register_module("norm", head->norm());
  register_module("lm_head", head->lm_head());
  if (spec.tie_word_embeddings) nn::tie(head->lm_head()->weight, embedding->weight);
  head_.emplace(head);
}

at::Tensor Decoder::forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& targets) {
  at::Tensor x = (*embedding_)(input_ids);
  for (auto& layer : layers_) x = layer(x);
  return (*head_)(x, targets);
}

at::Tensor Decoder::forward(const ModelInputs& inputs) {
  TESSERA_CHECK(!inputs.images, ErrorKind::kFormat,
                "pixel_values: found images, expected none for a model of text");
  return forward(inputs.input_ids, inputs.targets);
}

DecoderCache Decoder::make_cache(std::int64_t capacity) const {
  return {std::vector<nn::KvCache>(layers_.size(), nn::KvCache(capacity))};
}

at::Tensor Decoder::decode(const at::Tensor& input_ids, DecoderCache& cache) {
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(!embedding_->handle() && !head_->handle() && !layers_.front().handle(),
                ErrorKind::kUsage, "decode: found a sharded model, expected a whole one");
  TESSERA_INVARIANT(cache.layers.size() == layers_.size(), "a cache of another model");
  at::Tensor x = embedding_->module()->forward(input_ids);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    x = layers_[i].module()->decode(x, cache.layers[i]);
  }
  return head_->module()->forward(x.narrow(1, x.size(1) - 1, 1), std::nullopt).squeeze(1);
}

std::vector<ModelUnit> Decoder::units() {
  std::vector<ModelUnit> units;
  if (!spec_.tie_word_embeddings) units.push_back(unit_of(*embedding_, "model.embed_tokens"));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    units.push_back(unit_of(layers_[i], concat("model.layers.", i)));
  }
  if (!spec_.tie_word_embeddings) units.push_back(unit_of(*head_, kHeadUnit));
  return units;
}

void Decoder::set_recompute(RecomputeMode mode) {
  for (auto& layer : layers_) layer.module()->set_recompute(mode);
}

std::string Decoder::canonical_name(const std::string& unit, const std::string& path) const {
  if (unit != kHeadUnit) return unit + "." + path;
  return path.starts_with("norm.") ? "model." + path : path;
}

}  // namespace tessera::models
