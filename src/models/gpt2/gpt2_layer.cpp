#include "models/gpt2/gpt2_layer.h"

#include <ATen/ops/gelu.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <utility>
#include <vector>

#include "grad/region.h"
#include "models/recomputed.h"
#include "nn/linear.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kParts = 3;  // queries, keys and values

/// Of each part in the last dim those of this rank's heads.
at::Tensor own_columns(const at::Tensor& all, const nn::TensorRegion& region) {
  if (region.size() == 1) return all;
  const at::Tensor by_part = all.unflatten(-1, {kParts, -1});
  const std::int64_t own = region.part_of(by_part.size(-1));
  return by_part.narrow(-1, region.rank() * own, own).flatten(-2);
}

}  // namespace

Gpt2Attention::Gpt2Attention(const ModelSpec& spec, const nn::TensorRegion& region)
    : heads_(region.part_of(spec.num_attention_heads)),
      scale_(1.0 / std::sqrt(static_cast<double>(spec.head_dim))),
      region_(region) {
  const std::int64_t hidden = spec.hidden_size;
  // Columns of queries, keys and values stand in one matrix, of which a rank needs some of each: it
  // has all of it, computes with its own, and gives a gradient that is zero elsewhere.
  c_attn_ = register_module("c_attn", std::make_shared<TransposedLinear>(TransposedLinear::Options{
                                          .in = hidden,
                                          .out = kParts * hidden,
                                          .weight = region.inside(),
                                          .bias = region.inside(),
                                          .fused = {.count = static_cast<int>(kParts), .dim = 1}}));
  c_proj_ = register_module(
      "c_proj", std::make_shared<TransposedLinear>(row_parallel(region, hidden, hidden)));
}

Gpt2Attention::Heads Gpt2Attention::project(const at::Tensor& x) {
  const at::Tensor all =
      nn::linear(x, own_columns(c_attn_->weight, region_).t(), own_columns(c_attn_->bias, region_));
  const std::vector<at::Tensor> parts = all.chunk(kParts, 2);
  const auto by_head = [this](const at::Tensor& part) {
    return part.reshape({part.size(0), part.size(1), heads_, part.size(2) / heads_})
        .transpose(1, 2)
        .contiguous()
        .unsqueeze(3);
  };
  return {by_head(parts[0]), by_head(parts[1]), parts[2].contiguous()};
}

at::Tensor Gpt2Attention::forward(const at::Tensor& x, const nn::Documents& documents) {
  const auto mixed = [this](const std::vector<at::Tensor>& in) {
    const Heads heads = project(in[0]);
    return nn::causal_attention(heads.q, heads.k, heads.v, scale_, {.begins = in[1]});
  };
  return c_proj_->forward_into(region_, *this, {region_.enter(x), documents.starts}, mixed);
}

at::Tensor Gpt2Attention::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::NoGradGuard no_grad;
  const bool is_first = cache.length() == 0;
  const Heads heads = project(x);
  cache.append(heads.k, heads.v);
  return c_proj_->forward(
      is_first ? nn::causal_attention(heads.q, heads.k, heads.v, scale_)
               : nn::cached_attention(heads.q, cache.keys(), cache.values(), scale_));
}

Gpt2Mlp::Gpt2Mlp(const ModelSpec& spec, const nn::TensorRegion& region) : region_(region) {
  c_fc_ = register_module("c_fc", std::make_shared<TransposedLinear>(column_parallel(
                                      region, spec.hidden_size, spec.intermediate_size)));
  c_proj_ = register_module("c_proj", std::make_shared<TransposedLinear>(row_parallel(
                                          region, spec.intermediate_size, spec.hidden_size)));
}

at::Tensor Gpt2Mlp::forward(const at::Tensor& x) {
  const auto activated = [this](const std::vector<at::Tensor>& in) {
    return at::gelu(c_fc_->forward(in[0]), "tanh");
  };
  return c_proj_->forward_into(region_, *this, {region_.enter(x)}, activated);
}

Gpt2Layer::Gpt2Layer(const ModelSpec& spec, std::int64_t number, const ModelAxes& axes)
    : number_(number), is_alone_(axes.tensor.size() == 1) {
  const nn::TensorRegion& region = axes.tensor;
  const auto norm = [&](const char* name) {
    return register_module(
        name, std::make_shared<LayerNorm>(spec.hidden_size, spec.rms_norm_eps, region.on_stream()));
  };
  ln_1_ = norm("ln_1");
  attn_ = register_module("attn", std::make_shared<Gpt2Attention>(spec, region));
  ln_2_ = norm("ln_2");
  mlp_ = register_module("mlp", std::make_shared<Gpt2Mlp>(spec, region));
}

at::Tensor Gpt2Layer::forward(const at::Tensor& x, const nn::Documents& documents) {
  return recomputed(*this, recompute(), {x, documents.starts},
                    [this](const std::vector<at::Tensor>& in) {
                      return std::vector<at::Tensor>{body(in[0], {in[1]})};
                    })
      .front();
}

at::Tensor Gpt2Layer::body(const at::Tensor& x, const nn::Documents& documents) {
  const auto whole = [this](const std::vector<at::Tensor>& in) {
    const at::Tensor sum = in[0] + attn_->forward(ln_1_->forward(in[0]), {in[1]});
    return std::vector<at::Tensor>{sum + mlp_->forward(ln_2_->forward(sum))};
  };
  const std::vector<at::Tensor> inputs{x, documents.starts};
  return is_alone_ ? grad::in_region(*this, "", inputs, whole).front() : whole(inputs).front();
}

at::Tensor Gpt2Layer::decode(const at::Tensor& x, nn::KvCache& cache) {
  const at::Tensor sum = x + attn_->decode(ln_1_->forward(x), cache);
  return sum + mlp_->forward(ln_2_->forward(sum));
}

}  // namespace tessera::models
