#include "models/decoder_layer.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "grad/region.h"
#include "models/family.h"
#include "models/recomputed.h"
#include "nn/attention/attention.h"
#include "nn/attention/chunked_attention.h"
#include "nn/attention/mla.h"
#include "nn/state/delta_net.h"
#include "nn/state/mamba.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kOnePart = "mixer";  ///< of a layer that has no other

nn::NormRounding rounding_of(const FamilyTraits& family) {
  return family.norm_rounds_once ? nn::NormRounding::kOnce : nn::NormRounding::kBeforeWeight;
}

nn::NormFactor factor_of(const FamilyTraits& family) {
  return family.norm_adds_one ? nn::NormFactor::kOnePlusWeight : nn::NormFactor::kWeight;
}

nn::AttentionOptions attention_options(const ModelSpec& spec, std::int64_t number,
                                       const LocalSizes& sizes) {
  using Options = nn::AttentionOptions;
  const FamilyTraits& family = traits(spec.family);
  Options options{.hidden_size = spec.hidden_size,
                  .heads = sizes.heads,
                  .kv_heads = sizes.kv_heads,
                  .head_dim = spec.head_dim,
                  .bias = spec.attention_bias ? nn::Bias::kYes : nn::Bias::kNo,
                  .qk_norm = spec.use_qk_norm.value_or(family.qk_norm) ? Options::QkNorm::kYes
                                                                       : Options::QkNorm::kNo,
                  .norm_eps = spec.rms_norm_eps,
                  .region = sizes.axes.tensor,
                  .context = sizes.axes.context,
                  .all_kv_heads = spec.num_key_value_heads,
                  .norm_rounding = rounding_of(family),
                  .norm_factor = factor_of(family)};
  if (spec.rope.partial_rotary_factor != 1.0) options.turned = spec.turned_dim();
  if (family.fused_projections) options.projections = Options::Projections::kFused;
  if (family.qk_norm_over_heads) options.qk_norm = Options::QkNorm::kAllHeads;
  if (spec.query_pre_attn_scalar) options.scale = 1.0 / std::sqrt(*spec.query_pre_attn_scalar);
  if (spec.granite) options.scale = spec.granite->attention_multiplier;
  if (!family.output_bias) options.output_bias = nn::Bias::kNo;
  if (family.attention_sinks) options.sinks = Options::Sinks::kYes;
  if (family.attention_gate) options.gate = Options::Gate::kYes;
  if (spec.is_sliding(number)) options.window = spec.sliding_window;
  return options;
}

std::shared_ptr<nn::TokenMixer> chunked_attention(const ModelSpec& spec, std::int64_t number,
                                                  const LocalSizes& sizes,
                                                  std::shared_ptr<nn::Rope> rope) {
  const ChunkedSpec& chunked = *spec.chunked;
  nn::ChunkedAttentionOptions options{.hidden_size = spec.hidden_size,
                                      .heads = sizes.heads,
                                      .kv_heads = sizes.kv_heads,
                                      .head_dim = spec.head_dim,
                                      .bias = spec.attention_bias ? nn::Bias::kYes : nn::Bias::kNo,
                                      .region = sizes.axes.tensor,
                                      .context = sizes.axes.context,
                                      .all_kv_heads = spec.num_key_value_heads};
  if (spec.is_chunked(number)) {
    options.chunk = chunked.attention_chunk_size;
    if (chunked.use_qk_norm) options.qk_norm_eps = spec.rms_norm_eps;
  } else if (chunked.attn_temperature_tuning) {
    options.temperature = {chunked.attn_scale, static_cast<double>(chunked.floor_scale)};
  }
  return std::make_shared<nn::ChunkedAttention>(options, std::move(rope));
}

std::shared_ptr<nn::TokenMixer> delta_net(const ModelSpec& spec, const LocalSizes& sizes) {
  const DeltaNetSpec& linear = *spec.delta_net;
  return std::make_shared<nn::DeltaNet>(
      nn::DeltaNetOptions{.hidden_size = spec.hidden_size,
                          .key_heads = sizes.linear_key_heads,
                          .value_heads = sizes.linear_value_heads,
                          .key_dim = linear.linear_key_head_dim,
                          .value_dim = linear.linear_value_head_dim,
                          .conv_width = linear.linear_conv_kernel_dim,
                          .norm_eps = spec.rms_norm_eps,
                          .region = sizes.axes.tensor,
                          .projections = traits(spec.family).separate_delta_projections
                                             ? nn::DeltaNetOptions::Projections::kSeparate
                                             : nn::DeltaNetOptions::Projections::kByKeyHead});
}

std::shared_ptr<nn::TokenMixer> mamba(const ModelSpec& spec, const LocalSizes& sizes) {
  const MambaSpec& mamba = *spec.mamba;
  const auto layers = mamba.rescale_prenorm_residual ? std::optional(spec.num_hidden_layers)
                                                     : std::optional<std::int64_t>();
  return std::make_shared<nn::Mamba>(
      nn::MambaOptions{.hidden_size = spec.hidden_size,
                       .heads = sizes.mamba_heads,
                       .head_dim = mamba.mamba_head_dim,
                       .groups = sizes.mamba_groups,
                       .state_size = mamba.ssm_state_size,
                       .conv_width = mamba.conv_kernel,
                       .conv_bias = mamba.use_conv_bias ? nn::Bias::kYes : nn::Bias::kNo,
                       .chunk = mamba.chunk_size,
                       .least_step = mamba.time_step_min,
                       .first_steps = {.least = mamba.time_step_min,
                                       .most = mamba.time_step_max,
                                       .floor = mamba.time_step_floor},
                       .scaled_by_layers = layers,
                       .norm_eps = spec.rms_norm_eps,
                       .region = sizes.axes.tensor});
}

std::shared_ptr<nn::TokenMixer> make_attention(const ModelSpec& spec, std::int64_t number,
                                               const LocalSizes& sizes,
                                               std::shared_ptr<nn::Rope> rope) {
  if (spec.chunked) return chunked_attention(spec, number, sizes, std::move(rope));
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
                               .region = sizes.axes.tensor,
                               .context = sizes.axes.context};
  return std::make_shared<nn::Mla>(options, std::move(rope));
}

std::shared_ptr<nn::TokenMixer> make_mixer(const ModelSpec& spec, std::int64_t number,
                                           const LocalSizes& sizes,
                                           std::shared_ptr<nn::Rope> rope) {
  if (!spec.is_linear(number)) return make_attention(spec, number, sizes, std::move(rope));
  return spec.mamba ? mamba(spec, sizes) : delta_net(spec, sizes);
}

nn::Gate gate_of(const FamilyTraits& family) {
  switch (family.mlp_activation) {
    case MlpActivation::kSwiglu:
      return nn::Gate::kSilu;
    case MlpActivation::kGeglu:
      return nn::Gate::kGelu;
    case MlpActivation::kReluSquared:
      return nn::Gate::kNone;
  }
  TESSERA_INVARIANT(false, "an MLP's activation without a gate's kind");
}

}  // namespace

std::shared_ptr<nn::RmsNorm> decoder_norm(const ModelSpec& spec, const nn::TensorRegion& region) {
  const FamilyTraits& family = traits(spec.family);
  return std::make_shared<nn::RmsNorm>(spec.hidden_size, spec.rms_norm_eps, rounding_of(family),
                                       region.on_stream(), factor_of(family));
}

DecoderLayer::DecoderLayer(const ModelSpec& spec, std::int64_t number, const LocalSizes& sizes,
                           std::shared_ptr<nn::Rope> rope)
    : number_(number),
      is_alone_(sizes.axes.shares_no_layer()),
      feeds_alone_(sizes.axes.tensor.size() == 1) {
  const bool one_part = spec.has_one_part();
  if (!spec.sees_nothing(number)) {
    const char* name = spec.is_linear(number) ? "linear_attn" : "self_attn";
    mixer_ = register_module(one_part ? kOnePart : name,
                             make_mixer(spec, number, sizes, std::move(rope)));
  }
  if (!one_part || spec.sees_nothing(number)) add_feed_forward(spec, sizes);
  add_norms(spec, sizes.axes.tensor);
  if (spec.granite) addend_factor_ = spec.granite->residual_multiplier;
}

void DecoderLayer::add_feed_forward(const ModelSpec& spec, const LocalSizes& sizes) {
  const FamilyTraits& family = traits(spec.family);
  if (spec.is_moe(number_)) {
    moe_ =
        register_module(family.moe_names.module, std::make_shared<MoeLayer>(spec, number_, sizes));
    return;
  }
  const auto bias = spec.mlp_bias ? nn::Bias::kYes : nn::Bias::kNo;
  const auto first = family.fused_projections ? nn::GateAndUp::kFused : nn::GateAndUp::kSeparate;
  mlp_ = register_module(std::string(family.mlp_module),
                         std::make_shared<nn::Mlp>(spec.hidden_size, sizes.intermediate_size, bias,
                                                   sizes.axes.tensor, gate_of(family), first));
}

void DecoderLayer::add_norms(const ModelSpec& spec, const nn::TensorRegion& region) {
  const auto norm = [&](const char* name) {
    return register_module(name, decoder_norm(spec, region));
  };
  const NormPlacement placement = traits(spec.family).norms;
  if (placement == NormPlacement::kBeforeOnePart) {
    (mixer_ ? before_attention_ : before_feed_forward_) = norm("norm");
    return;
  }
  if (placement != NormPlacement::kAfter) before_attention_ = norm("input_layernorm");
  if (placement == NormPlacement::kBefore) {
    before_feed_forward_ = norm("post_attention_layernorm");
    return;
  }
  after_attention_ = norm("post_attention_layernorm");
  if (placement == NormPlacement::kAround) before_feed_forward_ = norm("pre_feedforward_layernorm");
  after_feed_forward_ = norm("post_feedforward_layernorm");
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
  const auto run = [this, statistics = request.statistics,
                    context = documents.context](const std::vector<at::Tensor>& in) {
    return body(in[0], {given(in[1]), statistics, given(in[3])}, {in[2], context}).tensors();
  };
  return Output::of(recomputed(*this, recompute(),
                               {x, request.imposed.value_or(at::Tensor()), documents.starts,
                                request.fillers.value_or(at::Tensor())},
                               run));
}

/// Regions end where it talks to other ranks, and where the host reads how tokens are spread.
DecoderLayer::Output DecoderLayer::body(const at::Tensor& x, const RoutingRequest& request,
                                        const nn::Documents& documents) {
  using Tensors = std::vector<at::Tensor>;
  const Tensors inputs{x, documents.starts};
  if (!has_feed_forward()) {
    const auto alone = [this, context = documents.context](const Tensors& in) {
      return Tensors{behind_mixer_alone(in[0], {in[1], context})};
    };
    return {is_alone_ ? grad::in_region(*this, "", inputs, alone)[0] : alone(inputs)[0], {}};
  }
  if (mlp_ && is_alone_) {
    const auto whole = [this, context = documents.context](const Tensors& in) {
      return feed_forward(up_to_feed_forward(in[0], {in[1], context}), {}).tensors();
    };
    return Output::of(grad::in_region(*this, "", inputs, whole));
  }
  const auto attention = [this, context = documents.context](const Tensors& in) {
    return up_to_feed_forward(in[0], {in[1], context});
  };
  const Tensors halves =
      is_alone_ ? grad::in_region(*this, "attention", inputs, attention) : attention(inputs);
  if (mlp_ && feeds_alone_) {
    const auto behind = [this](const Tensors& in) { return feed_forward(in, {}).tensors(); };
    return Output::of(grad::in_region(*this, "feed-forward", halves, behind));
  }
  return feed_forward(halves, request);
}

at::Tensor DecoderLayer::as_addend(const at::Tensor& half) const {
  return addend_factor_ ? half * *addend_factor_ : half;
}

/// The stream behind attention, and what the feed-forward sees of it where that is another tensor: a
/// region cannot be replayed with two arguments that share memory.
std::vector<at::Tensor> DecoderLayer::behind_attention(const at::Tensor& x,
                                                       const at::Tensor& attended) {
  const at::Tensor addend =
      as_addend(after_attention_ ? after_attention_->forward(attended) : attended);
  if (!before_feed_forward_) return {x + addend};
  auto [sum, normed] = before_feed_forward_->add_forward(x, addend);
  return {std::move(sum), std::move(normed)};
}

at::Tensor DecoderLayer::behind_mixer_alone(const at::Tensor& x, const nn::Documents& documents) {
  return x + as_addend(mixer_->forward(before_attention_->forward(x), documents));
}

std::vector<at::Tensor> DecoderLayer::up_to_feed_forward(const at::Tensor& x,
                                                         const nn::Documents& documents) {
  if (!mixer_) return {x, before_feed_forward_->forward(x)};
  return behind_attention(
      x, mixer_->forward(before_attention_ ? before_attention_->forward(x) : x, documents));
}

at::Tensor DecoderLayer::decode(const at::Tensor& x, nn::KvCache& cache) {
  if (!mixer_) {
    cache.advance(x.size(1));
    return feed_forward({x, before_feed_forward_->forward(x)}, {}).x;
  }
  const at::Tensor attended =
      mixer_->decode(before_attention_ ? before_attention_->forward(x) : x, cache);
  if (!has_feed_forward()) return x + as_addend(attended);
  return feed_forward(behind_attention(x, attended), {}).x;
}

DecoderLayer::Output DecoderLayer::feed_forward(const std::vector<at::Tensor>& halves,
                                                const RoutingRequest& request) {
  const at::Tensor &sum = halves.front(), &normed = halves.back();
  MoeLayer::Output fed =
      mlp_ ? MoeLayer::Output{mlp_->forward(normed), {}} : moe_->forward(normed, request);
  const at::Tensor addend =
      as_addend(after_feed_forward_ ? after_feed_forward_->forward(fed.x) : fed.x);
  return {sum + addend, std::move(fed.load)};
}

}  // namespace tessera::models
