#include "models/gemma4/gemma4_vision.h"

#include <ATen/ops/argsort.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <string>

#include "models/gemma4/gemma4_layer.h"
#include "models/patch_grid.h"
#include "models/recomputed.h"
#include "nn/attention/attention.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::models {
namespace {

constexpr const char* kPrefix = "model.vision_tower.";

/// [N, P] bool.
at::Tensor padding_of(const at::Tensor& position_ids) { return position_ids.eq(-1).all(2); }

}  // namespace

Gemma4PatchEmbedder::Gemma4PatchEmbedder(const Gemma4Vision& vision) {
  input_proj_ = nn::add_projection(*this, "input_proj",
                                   {3 * vision.patch_size * vision.patch_size, vision.hidden_size});
  position_embedding_table_ = add_parameter("position_embedding_table",
                                            {2, vision.position_embedding_size, vision.hidden_size},
                                            {.init = nn::InitKind::kOnes});
}

at::Tensor Gemma4PatchEmbedder::forward(const at::Tensor& pixel_values,
                                        const at::Tensor& position_ids) {
  const WideScope at_the_door;  // pixels are data, and places may be stored wider
  const at::ScalarType compute = input_proj_->weight.scalar_type();
  const at::Tensor pixels = ((pixel_values - 0.5) * 2).to(compute);
  const at::Tensor places = position_ids.clamp_min(0);
  const auto along = [&](std::int64_t axis) {
    const at::Tensor rows = places.select(2, axis).reshape({-1});
    return position_embedding_table_.select(0, axis).index_select(0, rows);
  };
  const at::Tensor place =
      (along(0) + along(1))
          .view({places.size(0), places.size(1), position_embedding_table_.size(2)})
          .masked_fill(padding_of(position_ids).unsqueeze(2), 0.0);
  return (input_proj_->forward(pixels) + place).to(compute);
}

Gemma4VisionAttention::Gemma4VisionAttention(const Gemma4Vision& vision)
    : heads_(vision.num_attention_heads),
      kv_heads_(vision.num_key_value_heads),
      head_dim_(vision.head_dim),
      eps_(vision.rms_norm_eps) {
  const auto projection = [&](const char* name, std::int64_t in, std::int64_t out) {
    return nn::add_projection(*this, name, {in, out, nn::WeightName::kInner});
  };
  q_proj_ = projection("q_proj", vision.hidden_size, heads_ * head_dim_);
  k_proj_ = projection("k_proj", vision.hidden_size, kv_heads_ * head_dim_);
  v_proj_ = projection("v_proj", vision.hidden_size, kv_heads_ * head_dim_);
  o_proj_ = projection("o_proj", heads_ * head_dim_, vision.hidden_size);
  q_norm_ = register_module("q_norm", gemma_norm(head_dim_, eps_));
  k_norm_ = register_module("k_norm", gemma_norm(head_dim_, eps_));
}

at::Tensor Gemma4VisionAttention::forward(const at::Tensor& x, const nn::AxialTable& table,
                                          const at::Tensor& visible) {
  const auto turned = [&](nn::Linear& projection, const nn::HeadLayout& layout,
                          const nn::RmsNorm& norm) {
    return nn::axial_rope_heads(projection.forward(x), layout,
                                {norm.weight, norm.eps(), norm.rounding()}, table);
  };
  const at::Tensor q = turned(*q_proj_, {.heads = heads_, .repeat = heads_ / kv_heads_}, *q_norm_);
  const at::Tensor k = turned(*k_proj_, {.heads = kv_heads_}, *k_norm_);
  const at::Tensor raw = v_proj_->forward(x);
  const at::Tensor by_head = raw.view({x.size(0), x.size(1), kv_heads_, head_dim_});
  const at::Tensor v = nn::plain_rms_norm(by_head, eps_).view(raw.sizes());
  // Every patch sees all that are no padding, wherever it is: these first, as one run of keys.
  const at::Tensor seen = visible.squeeze(1);
  const at::Tensor order = at::argsort(seen, /*stable=*/true, 1, /*descending=*/true);
  const at::Tensor keys =
      k.gather(2, order.view({k.size(0), 1, k.size(2), 1, 1}).expand(k.sizes()));
  const at::Tensor values = v.gather(1, order.unsqueeze(2).expand(v.sizes()));
  const nn::AttentionMask mask{.ends = seen.sum(1, /*keepdim=*/true).expand(seen.sizes())};
  return o_proj_->forward(nn::causal_attention(q, keys, values, kGemma4ScoreScale, mask));
}

Gemma4VisionLayer::Gemma4VisionLayer(const Gemma4Vision& vision) {
  const auto norm = [&](const char* name) {
    return register_module(name, gemma_norm(vision.hidden_size, vision.rms_norm_eps));
  };
  self_attn_ = register_module("self_attn", std::make_shared<Gemma4VisionAttention>(vision));
  mlp_ = register_module(
      "mlp", std::make_shared<nn::GegluMlp>(vision.hidden_size, vision.intermediate_size,
                                            nn::WeightName::kInner));
  input_layernorm_ = norm("input_layernorm");
  post_attention_layernorm_ = norm("post_attention_layernorm");
  pre_feedforward_layernorm_ = norm("pre_feedforward_layernorm");
  post_feedforward_layernorm_ = norm("post_feedforward_layernorm");
}

at::Tensor Gemma4VisionLayer::forward(const at::Tensor& x, const nn::AxialTable& table,
                                      const at::Tensor& visible) {
  return recomputed(
      *this, recompute_, {x, table.cos, table.sin, visible},
      [this](const std::vector<at::Tensor>& in) { return body(in[0], {in[1], in[2]}, in[3]); });
}

at::Tensor Gemma4VisionLayer::body(const at::Tensor& x, const nn::AxialTable& table,
                                   const at::Tensor& visible) {
  const at::Tensor attended = self_attn_->forward(input_layernorm_->forward(x), table, visible);
  const at::Tensor middle = x + post_attention_layernorm_->forward(attended);
  const at::Tensor fed = mlp_->forward(pre_feedforward_layernorm_->forward(middle));
  return middle + post_feedforward_layernorm_->forward(fed);
}

Gemma4VisionTower::Gemma4VisionTower(const Gemma4Vision& vision) : vision_(vision) {
  patch_embedder_ =
      grad::Slot(register_module("patch_embedder", std::make_shared<Gemma4PatchEmbedder>(vision)));
  const auto encoder = register_module("encoder", std::make_shared<Prefix>());
  const auto layers = encoder->register_module("layers", std::make_shared<Prefix>());
  for (std::int64_t i = 0; i < vision.num_hidden_layers; ++i) {
    layers_.emplace_back(
        layers->register_module(std::to_string(i), std::make_shared<Gemma4VisionLayer>(vision)));
  }
  if (!vision.standardize) return;
  std_bias_ = register_buffer("std_bias", at::zeros({vision.hidden_size}));
  std_scale_ = register_buffer("std_scale", at::ones({vision.hidden_size}));
}

at::Tensor Gemma4VisionTower::pool(const at::Tensor& h, const at::Tensor& patches) const {
  const WideScope pooling;
  const at::ScalarType inside = at::promote_types(h.scalar_type(), at::kFloat);
  const std::int64_t kernel = patches.size(1);
  const at::Tensor rows = h.reshape({h.size(0) * h.size(1), h.size(2)})
                              .index_select(0, patches.reshape({patches.numel()}))
                              .view({patches.size(0), kernel, h.size(2)});
  const at::Tensor mean =
      (rows.to(inside).sum(1) / static_cast<double>(kernel)).to(h.scalar_type());
  at::Tensor scaled = mean.to(inside) * std::sqrt(static_cast<double>(vision_.hidden_size));
  if (std_bias_.defined()) scaled = (scaled - std_bias_.to(inside)) * std_scale_.to(inside);
  return scaled.to(h.scalar_type());
}

at::Tensor Gemma4VisionTower::forward(const Images& images) {
  const PatchGrid grid = patch_grid(images.position_ids, vision_.patches());
  const at::Tensor& pixels = images.pixel_values;
  const std::int64_t values = 3 * vision_.patch_size * vision_.patch_size;
  TESSERA_CHECK(pixels.dim() == 3 && pixels.size(0) == images.position_ids.size(0) &&
                    pixels.size(1) == images.position_ids.size(1) && pixels.size(2) == values,
                ErrorKind::kFormat, "pixel_values: found ", pixels.sizes(), ", expected [",
                images.position_ids.size(0), ", ", images.position_ids.size(1), ", ", values,
                "] with image_position_ids");
  at::Tensor h = patch_embedder_(pixels, images.position_ids);
  const nn::AxialTable table =
      nn::axial_table(images.position_ids, vision_.head_dim, vision_.rope_theta, h.scalar_type());
  const at::Tensor visible = padding_of(images.position_ids).logical_not().unsqueeze(1);
  for (auto& layer : layers_) h = layer(h, table, visible);
  return pool(h, grid.patches);
}

std::vector<ModelUnit> Gemma4VisionTower::units() {
  std::vector<ModelUnit> units;
  units.push_back(unit_of(patch_embedder_, std::string(kPrefix) + "patch_embedder"));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    units.push_back(unit_of(layers_[i], concat(kPrefix, "encoder.layers.", i)));
  }
  return units;
}

void Gemma4VisionTower::set_recompute(RecomputeMode mode) {
  for (auto& layer : layers_) layer.module()->set_recompute(mode);
}

Gemma4Projector::Gemma4Projector(const Gemma4Vision& vision, std::int64_t text_hidden_size)
    : eps_(vision.rms_norm_eps) {
  embedding_projection_ =
      nn::add_projection(*this, "embedding_projection", {vision.hidden_size, text_hidden_size});
}

at::Tensor Gemma4Projector::forward(const at::Tensor& soft_tokens) {
  return embedding_projection_->forward(nn::plain_rms_norm(soft_tokens, eps_));
}

}  // namespace tessera::models
