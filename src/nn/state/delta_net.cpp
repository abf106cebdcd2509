#include "nn/state/delta_net.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/softplus.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "grad/region.h"
#include "nn/state/rate.h"
#include "nn/state/state_part.h"
#include "nn/wide_dtype.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

DeltaNet::DeltaNet(const DeltaNetOptions& options) : options_(options) {
  const TensorRegion& region = options.region;
  const std::int64_t ranks = region.size();
  const std::int64_t keys = options.key_heads * options.key_dim;
  const std::int64_t values = options.value_heads * options.value_dim;
  TESSERA_INVARIANT(options.key_heads > 0 && options.value_heads % options.key_heads == 0,
                    "value heads without a key head");
  dt_bias_ = add_parameter("dt_bias", {options.value_heads},
                           bias_of_layer(region.column(), InitKind::kOnes));
  a_log_ = add_parameter("A_log", {options.value_heads},
                         bias_of_layer(region.column(), InitKind::kLogOfUniform));
  conv1d_ = register_module(
      "conv1d",
      std::make_shared<Conv1d>(2 * keys + values, options.conv_width, Bias::kNo,
                               region.sections({ranks * keys, ranks * keys, ranks * values})));
  add_projections(keys, values);
  norm_ = register_module("norm", std::make_shared<GatedNorm>(options.value_dim, region.inside()));
  out_proj_ = register_module(
      "out_proj",
      std::make_shared<Linear>(values, options.hidden_size, Bias::kNo, row_parallel(region)));
}

void DeltaNet::add_projections(std::int64_t keys, std::int64_t values) {
  const TensorRegion& region = options_.region;
  const std::int64_t ranks = region.size();
  const auto input = [&](const char* name, std::int64_t out, LinearPlacement placement) {
    return register_module(
        name, std::make_shared<Linear>(options_.hidden_size, out, Bias::kNo, std::move(placement)));
  };
  if (options_.projections == DeltaNetOptions::Projections::kByKeyHead) {
    in_proj_qkvz_ = input("in_proj_qkvz", 2 * keys + 2 * values, column_parallel(region));
    in_proj_ba_ = input("in_proj_ba", 2 * options_.value_heads, column_parallel(region));
    return;
  }
  in_proj_qkv_ = input("in_proj_qkv", 2 * keys + values,
                       side_by_side(region, {ranks * keys, ranks * keys, ranks * values}));
  in_proj_z_ = input("in_proj_z", values, column_parallel(region));
  in_proj_b_ = input("in_proj_b", options_.value_heads, column_parallel(region));
  in_proj_a_ = input("in_proj_a", options_.value_heads, column_parallel(region));
}

DeltaNet::Projected DeltaNet::project_separately(const at::Tensor& x) const {
  return {in_proj_qkv_->forward(x),
          in_proj_z_->forward(x).unflatten(2, {options_.value_heads, options_.value_dim}),
          in_proj_b_->forward(x), in_proj_a_->forward(x)};
}

DeltaNet::Projected DeltaNet::project(const at::Tensor& x) const {
  if (in_proj_qkv_) return project_separately(x);
  const std::int64_t rows = x.size(0), positions = x.size(1), groups = options_.key_heads;
  const std::int64_t each = options_.value_heads / groups;  // value heads of a key head
  const std::int64_t values = each * options_.value_dim;
  const auto by_head =
      in_proj_qkvz_->forward(x)
          .view({rows, positions, groups, 2 * options_.key_dim + 2 * values})
          .split_with_sizes({options_.key_dim, options_.key_dim, values, values}, 3);
  const auto rates =
      in_proj_ba_->forward(x).view({rows, positions, groups, 2 * each}).split(each, 3);
  const auto of_all = [](const at::Tensor& part) { return part.flatten(2); };
  return {at::cat({of_all(by_head[0]), of_all(by_head[1]), of_all(by_head[2])}, 2),
          by_head[3].reshape({rows, positions, options_.value_heads, options_.value_dim}),
          of_all(rates[0]), of_all(rates[1])};
}

DeltaInputs DeltaNet::inputs_of(const at::Tensor& mixed, const Projected& projected) const {
  const std::int64_t rows = mixed.size(0), positions = mixed.size(1);
  const std::int64_t keys = options_.key_heads * options_.key_dim;
  const std::int64_t values = options_.value_heads * options_.value_dim;
  const auto parts = mixed.split_with_sizes({keys, keys, values}, 2);
  const auto heads = [&](const at::Tensor& part, std::int64_t count, std::int64_t dim) {
    return part.reshape({rows, positions, count, dim});
  };
  const WideScope rates;
  const at::ScalarType wide = wide_dtype(mixed);
  const at::Tensor step = at::softplus(projected.a.to(wide) + dt_bias_.to(wide));
  return {.q = heads(parts[0], options_.key_heads, options_.key_dim),
          .k = heads(parts[1], options_.key_heads, options_.key_dim),
          .v = heads(parts[2], options_.value_heads, options_.value_dim),
          .decay = rate_of_state(a_log_, wide) * step,
          .beta = projected.b.to(wide).sigmoid()};
}

at::Tensor DeltaNet::normed(const at::Tensor& core, const at::Tensor& z) const {
  return gated_rms_norm(core, z, norm_->weight, options_.norm_eps).flatten(2);
}

at::Tensor DeltaNet::forward(const at::Tensor& x, const Documents& documents) {
  using Tensors = std::vector<at::Tensor>;
  const auto mixed = [this](const Tensors& in) {
    grad::refuse_recording("a layer with a state");
    const Documents of_rows{in[1]};
    const Projected projected = project(in[0]);
    const at::Tensor qkv =
        conv1d_->forward(projected.qkv, documents_of(StatePart::kConvolution, of_rows));
    return normed(
        gated_delta_rule(inputs_of(qkv, projected), documents_of(StatePart::kRecurrence, of_rows)),
        projected.z);
  };
  return out_proj_->forward_into(options_.region, *this,
                                 {options_.region.enter(x), documents.starts}, mixed);
}

at::Tensor DeltaNet::decode(const at::Tensor& x, KvCache& cache) {
  const at::NoGradGuard no_grad;
  cache.advance(x.size(1));
  const Projected projected = project(x);
  const at::Tensor qkv = conv1d_->after(projected.qkv, cache.state.context);
  const at::Tensor core = gated_delta_rule_after(inputs_of(qkv, projected), cache.state.state);
  return out_proj_->forward(normed(core, projected.z));
}

}  // namespace tessera::nn
