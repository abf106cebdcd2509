#include "models/gemma4/gemma4_layer.h"

#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <utility>

#include "grad/region.h"
#include "models/recomputed.h"
#include "nn/attention/attention.h"
#include "nn/attention/attention_parts.h"
#include "nn/attention/context_attention.h"
#include "tessera/wide_scope.h"

namespace tessera::models {
std::shared_ptr<nn::RmsNorm> gemma_norm(std::int64_t size, double eps, ParameterLayout layout) {
  return std::make_shared<nn::RmsNorm>(size, eps, nn::NormRounding::kOnce, std::move(layout));
}

Gemma4Attention::Gemma4Attention(const ModelSpec& spec, const Gemma4Layer& layer,
                                 const nn::TensorRegion& region, nn::ContextRegion context,
                                 std::shared_ptr<nn::Rope> rope)
    : heads_(region.part_of(spec.num_attention_heads)),
      groups_(nn::heads_of_rank(layer.num_key_value_heads, region.size())),
      layer_(layer),
      window_(layer.type == LayerType::kSliding ? std::optional(spec.gemma4->sliding_window)
                                                : std::nullopt),
      region_(region),
      context_(std::move(context)),
      eps_(spec.rms_norm_eps),
      rope_(std::move(rope)) {
  const std::int64_t q_size = heads_ * layer.head_dim;
  const auto projection = [&](const char* name, std::int64_t in, std::int64_t out,
                              nn::LinearPlacement placement) {
    return nn::add_projection(*this, name, {in, out, nn::WeightName::kOwn, std::move(placement)});
  };
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t kv_size = groups_ * layer.head_dim;
  const auto by_heads = nn::by_heads(region, layer.num_key_value_heads);
  q_proj_ = projection("q_proj", hidden, q_size, nn::column_parallel(region));
  k_proj_ = projection("k_proj", hidden, kv_size, by_heads);
  if (!layer.key_is_value) v_proj_ = projection("v_proj", hidden, kv_size, by_heads);
  o_proj_ = projection("o_proj", q_size, hidden, nn::row_parallel(region));
  q_norm_ = register_module("q_norm", gemma_norm(layer.head_dim, eps_, region.inside()));
  k_norm_ = register_module("k_norm", gemma_norm(layer.head_dim, eps_, region.inside()));
}

at::Tensor Gemma4Attention::forward(const at::Tensor& stream, const Gemma4Seen& seen) {
  const auto mixed = [this, context = seen.documents.context](const std::vector<at::Tensor>& in) {
    const at::Tensor& x = in[0];
    const Gemma4Seen of_rows{{in[1], context}, in[2]};
    const nn::RopeTable table =
        rope_->table(of_rows.documents.positions(x), x.scalar_type(), x.device());
    return attend(project(x, nn::table_of(of_rows.documents, table)), of_rows);
  };
  return nn::project_out(*o_proj_, region_, *this,
                         {region_.enter(stream), seen.documents.starts, seen.ends}, mixed,
                         seen.documents.are_shared());
}

at::Tensor Gemma4Attention::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = cache.length();
  const Heads heads =
      project(x, nn::turns_from(*rope_, begin, cache.capacity(), x, x.scalar_type()));
  cache.append(heads.k, heads.v);
  if (begin == 0) return o_proj_->forward(attend(heads, {}));
  const bool slides = window_ && cache.length() > *window_;
  return o_proj_->forward(
      slides ? nn::windowed_attention(heads.q, cache.keys(), cache.values(), {.window = window_},
                                      kGemma4ScoreScale)
             : nn::cached_attention(heads.q, cache.keys(), cache.values(), kGemma4ScoreScale));
}

Gemma4Attention::Heads Gemma4Attention::project(const at::Tensor& x, const nn::RopeTable& table) {
  const auto head_norm = [&](const nn::RmsNorm& norm) {
    return nn::HeadNorm{norm.weight, norm.eps(), norm.rounding()};
  };
  const at::Tensor keys = k_proj_->forward(x);
  const at::Tensor raw = v_proj_ ? v_proj_->forward(x) : keys;
  at::Tensor q = nn::rope_heads(q_proj_->forward(x), {.heads = heads_, .repeat = heads_ / groups_},
                                head_norm(*q_norm_), table);
  at::Tensor k = nn::rope_heads(keys, {.heads = groups_}, head_norm(*k_norm_), table);
  const at::Tensor by_head = raw.reshape({x.size(0), x.size(1), groups_, layer_.head_dim});
  return {std::move(q), std::move(k), nn::plain_rms_norm(by_head, eps_).reshape(raw.sizes())};
}

at::Tensor Gemma4Attention::attend(const Heads& heads, const Gemma4Seen& seen) const {
  nn::AttentionMask mask{.window = window_, .begins = seen.documents.starts};
  if (window_) mask.ends = seen.ends;
  return nn::context_attention({heads.q, heads.k, heads.v}, kGemma4ScoreScale, mask,
                               nn::Scores::kOfInputs, context_, seen.documents);
}

Gemma4Router::Gemma4Router(const ModelSpec& spec, std::int64_t number,
                           const nn::TensorRegion& region)
    : HasExpertBias(*spec.moe), moe_(*spec.moe), number_(number), eps_(spec.rms_norm_eps) {
  proj_ = nn::add_projection(
      *this, "proj",
      {spec.hidden_size, moe_.num_experts, nn::WeightName::kOwn, nn::inside(region)});
  scale_ = add_parameter("scale", {spec.hidden_size}, nn::norm_weight(region.inside()));
  per_expert_scale_ =
      add_parameter("per_expert_scale", {moe_.num_experts}, nn::norm_weight(region.inside()));
}

moe::Routing Gemma4Router::forward(const at::Tensor& x, const std::optional<at::Tensor>& imposed) {
  const double root = 1.0 / std::sqrt(static_cast<double>(x.size(1)));
  // From here on in fp32, in any storage dtype of the router: rounded scores choose other experts.
  const WideScope router;
  const at::ScalarType inside = at::promote_types(proj_->weight.scalar_type(), at::kFloat);
  const at::Tensor scaled = nn::plain_rms_norm(x, eps_).to(inside) * scale_ * root;
  moe::Routing routing = moe::route(nn::linear(scaled, proj_->weight, {}, inside),
                                    {.experts_per_token = moe_.experts_per_token,
                                     .normalize = moe_.norm_topk_prob,
                                     .expert_bias = expert_bias(),
                                     .layer = number_},
                                    imposed);
  const at::Tensor factors = per_expert_scale_.index_select(0, routing.indices.reshape({-1}));
  routing.weights =
      routing.weights * factors.view(routing.weights.sizes()).to(routing.weights.scalar_type());
  return routing;
}

Gemma4TextLayer::Gemma4TextLayer(const ModelSpec& spec, std::size_t number, const ModelAxes& axes,
                                 std::shared_ptr<nn::Rope> rope)
    : number_(static_cast<std::int64_t>(number)), tokens_(axes), is_alone_(axes.shares_no_layer()) {
  const nn::TensorRegion& region = axes.tensor;
  const auto norm = [&](const char* name) {
    return register_module(name,
                           gemma_norm(spec.hidden_size, spec.rms_norm_eps, region.on_stream()));
  };
  self_attn_ = register_module(
      "self_attn", std::make_shared<Gemma4Attention>(spec, spec.gemma4->layers.at(number), region,
                                                     axes.context, std::move(rope)));
  mlp_ = register_module("mlp", std::make_shared<nn::GegluMlp>(
                                    spec.hidden_size, region.part_of(spec.intermediate_size),
                                    nn::WeightName::kOwn, region));
  input_layernorm_ = norm("input_layernorm");
  post_attention_layernorm_ = norm("post_attention_layernorm");
  pre_feedforward_layernorm_ = norm("pre_feedforward_layernorm");
  post_feedforward_layernorm_ = norm("post_feedforward_layernorm");
  if (spec.moe) {
    post_feedforward_layernorm_1_ = norm("post_feedforward_layernorm_1");
    post_feedforward_layernorm_2_ = norm("post_feedforward_layernorm_2");
    pre_feedforward_layernorm_2_ = norm("pre_feedforward_layernorm_2");
    router_ = register_module("router", std::make_shared<Gemma4Router>(spec, number_, region));
    experts_ =
        register_module("experts", std::make_shared<ExpertBank>(spec, local_sizes(spec, axes)));
  }
  layer_scalar_ = register_buffer("layer_scalar", at::ones({1}));
}

DecoderLayer::Output Gemma4TextLayer::feed_forward(const at::Tensor& x,
                                                   const RoutingRequest& request) {
  const at::Tensor dense = mlp_->forward(pre_feedforward_layernorm_->forward(x));
  if (!router_) return {dense, {}};
  auto [given, load] = mixed(x, request);
  const at::Tensor experts = post_feedforward_layernorm_2_->forward(given);
  return {post_feedforward_layernorm_1_->forward(dense) + experts, std::move(load)};
}

/// The router sees the stream itself, the experts see it normed: both become tokens alike.
DecoderLayer::Output Gemma4TextLayer::mixed(const at::Tensor& x, const RoutingRequest& request) {
  const at::Tensor normed = pre_feedforward_layernorm_2_->forward(x);
  const at::Tensor entered = tokens_.enter(normed);
  const moe::Routing routing =
      router_->forward(tokens_.routed(x, tokens_.enter(x)),
                       tokens_.values_of_routed(request.imposed, x.size(0), x.size(1)));
  const at::Tensor given =
      experts_->forward(tokens_.sent(tokens_.routed(normed, entered)), tokens_.sent(routing));
  return {
      tokens_.leave(tokens_.returned(given, entered.sizes())),
      tokens_.counted(load_of(routing, request.statistics,
                              tokens_.values_of_routed(request.fillers, x.size(0), x.size(1))))};
}

DecoderLayer::Output Gemma4TextLayer::forward(const at::Tensor& x, const Gemma4Seen& seen,
                                              const RoutingRequest& request) {
  // An absent tensor is passed as an undefined one.
  return DecoderLayer::Output::of(recomputed(
      *this, recompute(),
      {x, seen.documents.starts, seen.ends, request.imposed.value_or(at::Tensor()),
       request.fillers.value_or(at::Tensor())},
      [this, statistics = request.statistics,
       context = seen.documents.context](const std::vector<at::Tensor>& in) {
        return body(in[0], {{in[1], context}, in[2]}, {given(in[3]), statistics, given(in[4])})
            .tensors();
      }));
}

at::Tensor Gemma4TextLayer::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::Tensor attended = self_attn_->decode(input_layernorm_->forward(x), cache);
  return behind_attention(x + post_attention_layernorm_->forward(attended), {}).x;
}

/// As DecoderLayer's. With experts the region ends in front of them.
DecoderLayer::Output Gemma4TextLayer::body(const at::Tensor& x, const Gemma4Seen& seen,
                                           const RoutingRequest& request) {
  using Tensors = std::vector<at::Tensor>;
  const Tensors inputs{x, seen.documents.starts, seen.ends};
  const auto attention = [this, context = seen.documents.context](const Tensors& in) {
    return Tensors{up_to_feed_forward(in[0], {{in[1], context}, in[2]})};
  };
  if (!is_alone_) return behind_attention(attention(inputs).front(), request);
  if (router_) {
    return behind_attention(grad::in_region(*this, "attention", inputs, attention).front(),
                            request);
  }
  const auto whole = [this, attention](const Tensors& in) {
    return behind_attention(attention(in).front(), {}).tensors();
  };
  return DecoderLayer::Output::of(grad::in_region(*this, "", inputs, whole));
}

at::Tensor Gemma4TextLayer::up_to_feed_forward(const at::Tensor& x, const Gemma4Seen& seen) {
  const at::Tensor attended = self_attn_->forward(input_layernorm_->forward(x), seen);
  return x + post_attention_layernorm_->forward(attended);
}

DecoderLayer::Output Gemma4TextLayer::behind_attention(const at::Tensor& middle,
                                                       const RoutingRequest& request) {
  auto [fed, load] = feed_forward(middle, request);
  const at::Tensor sum = middle + post_feedforward_layernorm_->forward(fed);
  const WideScope scaled;  // the buffer may be stored wider
  return {(sum * layer_scalar_).to(sum.scalar_type()), std::move(load)};
}

}  // namespace tessera::models
