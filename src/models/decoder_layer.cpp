#include "models/decoder_layer.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "grad/region.h"
#include "models/family.h"
#include "models/recomputed.h"
#include "nn/attention.h"
#include "nn/mla.h"

namespace tessera::models {
namespace {

nn::AttentionOptions attention_options(const ModelSpec& spec, std::int64_t number,
                                       const LocalSizes& sizes) {
  using Options = nn::AttentionOptions;
  const FamilyTraits& family = traits(spec.family);
  Options options{.hidden_size = spec.hidden_size,
                  .heads = sizes.heads,
                  .kv_heads = sizes.kv_heads,
                  .head_dim = spec.head_dim,
                  .bias = spec.attention_bias ? nn::Bias::kYes : nn::Bias::kNo,
                  .qk_norm = family.qk_norm ? Options::QkNorm::kYes : Options::QkNorm::kNo,
                  .norm_eps = spec.rms_norm_eps,
                  .region = sizes.axes.tensor,
                  .all_kv_heads = spec.num_key_value_heads};
  if (!family.output_bias) options.output_bias = nn::Bias::kNo;
  if (family.attention_sinks) options.sinks = Options::Sinks::kYes;
  if (spec.is_sliding(number)) options.window = spec.sliding_window;
  return options;
}

std::shared_ptr<nn::SelfAttention> make_attention(const ModelSpec& spec, std::int64_t number,
                                                  const LocalSizes& sizes,
                                                  std::shared_ptr<nn::Rope> rope) {
  if (!spec.mla) {
    return std::make_shared<nn::Attention>(attention_options(spec, number, sizes), std::move(rope));
  }
  const MlaSpec& mla = *spec.mla;
  const auto qk_head_dim = static_cast<double>(mla.qk_head_dim());
  const nn::MlaOptions options{.hidden_size = spec.hidden_size,
                               .heads = sizes.heads,
                               .q_lora_rank = mla.q_lora_rank,
                               .kv_lora_rank = mla.kv_lora_rank,
                               .qk_nope_head_dim = mla.qk_nope_head_dim,
                               .qk_rope_head_dim = mla.qk_rope_head_dim,
                               .v_head_dim = mla.v_head_dim,
                               .bias = spec.attention_bias ? nn::Bias::kYes : nn::Bias::kNo,
                               .scale = softmax_factor(spec.rope) / std::sqrt(qk_head_dim),
                               .region = sizes.axes.tensor};
  return std::make_shared<nn::Mla>(options, std::move(rope));
}

}  // namespace

std::shared_ptr<nn::RmsNorm> decoder_norm(const ModelSpec& spec, const nn::TensorRegion& region) {
  const auto rounding = traits(spec.family).norm_rounds_once ? nn::NormRounding::kOnce
                                                             : nn::NormRounding::kBeforeWeight;
  return std::make_shared<nn::RmsNorm>(spec.hidden_size, spec.rms_norm_eps, rounding,
                                       region.on_stream());
}

DecoderLayer::DecoderLayer(const ModelSpec& spec, std::int64_t number, const LocalSizes& sizes,
                           std::shared_ptr<nn::Rope> rope)
    : number_(number), is_alone_(sizes.axes.tensor.size() == 1) {
  self_attn_ = register_module("self_attn", make_attention(spec, number, sizes, std::move(rope)));
  if (spec.is_moe(number)) {
    moe_ = register_module("mlp", std::make_shared<MoeLayer>(spec, sizes));
  } else {
    const auto bias = spec.mlp_bias ? nn::Bias::kYes : nn::Bias::kNo;
    mlp_ =
        register_module("mlp", std::make_shared<nn::Mlp>(spec.hidden_size, sizes.intermediate_size,
                                                         bias, sizes.axes.tensor));
  }
  input_layernorm_ = register_module("input_layernorm", decoder_norm(spec, sizes.axes.tensor));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm", decoder_norm(spec, sizes.axes.tensor));
}

std::vector<at::Tensor> DecoderLayer::Output::tensors() const {
  std::vector<at::Tensor> results{x};
  if (load.counts.defined()) results.push_back(load.counts);
  if (load.probabilities.defined()) results.push_back(load.probabilities);
  return results;
}

DecoderLayer::Output DecoderLayer::Output::of(const std::vector<at::Tensor>& tensors) {
  Output output{tensors[0], {}};
  if (tensors.size() > 1) output.load.counts = tensors[1];
  if (tensors.size() > 2) output.load.probabilities = tensors[2];
  return output;
}

DecoderLayer::Output DecoderLayer::forward(const at::Tensor& x, const RoutingRequest& request,
                                           const nn::Documents& documents) {
  // Routing and documents that are not there go through as undefined tensors.
  const auto run = [this, statistics = request.statistics](const std::vector<at::Tensor>& in) {
    return body(in[0], {given(in[1]), statistics}, {in[2]}).tensors();
  };
  return Output::of(recomputed(*this, recompute(),
                               {x, request.imposed.value_or(at::Tensor()), documents.starts}, run));
}

/// Regions end where it talks to other ranks, and where the host reads how tokens are spread.
DecoderLayer::Output DecoderLayer::body(const at::Tensor& x, const RoutingRequest& request,
                                        const nn::Documents& documents) {
  using Tensors = std::vector<at::Tensor>;
  const Tensors inputs{x, documents.starts};
  if (mlp_ && is_alone_) {
    const auto whole = [this](const Tensors& in) {
      const Tensors halves = up_to_feed_forward(in[0], {in[1]});
      return feed_forward(halves[0], halves[1], {}).tensors();
    };
    return Output::of(grad::in_region(*this, "", inputs, whole));
  }
  const auto attention = [this](const Tensors& in) { return up_to_feed_forward(in[0], {in[1]}); };
  const Tensors halves =
      is_alone_ ? grad::in_region(*this, "attention", inputs, attention) : attention(inputs);
  return feed_forward(halves[0], halves[1], request);
}

/// The stream behind attention, and its norm.
std::vector<at::Tensor> DecoderLayer::up_to_feed_forward(const at::Tensor& x,
                                                         const nn::Documents& documents) {
  const at::Tensor attended = self_attn_->forward(input_layernorm_->forward(x), documents);
  auto [sum, normed] = post_attention_layernorm_->add_forward(x, attended);
  return {std::move(sum), std::move(normed)};
}

at::Tensor DecoderLayer::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::Tensor attended = self_attn_->decode(input_layernorm_->forward(x), cache);
  const auto [sum, normed] = post_attention_layernorm_->add_forward(x, attended);
  return feed_forward(sum, normed, {}).x;
}

DecoderLayer::Output DecoderLayer::feed_forward(const at::Tensor& sum, const at::Tensor& normed,
                                                const RoutingRequest& request) {
  if (mlp_) return {sum + mlp_->forward(normed), {}};
  auto [fed, load] = moe_->forward(normed, request);
  return {sum + fed, std::move(load)};
}

}  // namespace tessera::models
