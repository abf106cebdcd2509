#include "nn/state/mamba.h"

#include <ATen/ops/softplus.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <utility>
#include <vector>

#include "grad/region.h"
#include "nn/state/rate.h"
#include "nn/state/state_part.h"
#include "nn/wide_dtype.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

Mamba::Mamba(const MambaOptions& options) : options_(options) {
  const TensorRegion& region = options.region;
  const std::int64_t ranks = region.size();
  const std::int64_t inner = inner_size(), grouped = group_size();
  TESSERA_INVARIANT(options.groups > 0 && options.heads % options.groups == 0,
                    "heads without a group");
  const auto of_heads = [&](const char* name, InitKind init) {
    return add_parameter(name, {options.heads}, bias_of_layer(region.column(), init));
  };
  Declaration biases = bias_of_layer(region.column(), InitKind::kInverseSoftplus);
  biases.steps = options.first_steps;
  dt_bias_ = add_parameter("dt_bias", {options.heads}, std::move(biases));
  a_log_ = of_heads("A_log", InitKind::kLogOfNumber);
  d_ = of_heads("D", InitKind::kOnes);
  conv1d_ = register_module(
      "conv1d",
      std::make_shared<Conv1d>(inner + 2 * grouped, options.conv_width, options.conv_bias,
                               region.sections({ranks * inner, ranks * grouped, ranks * grouped})));
  in_proj_ = register_module(
      "in_proj", std::make_shared<Linear>(
                     options.hidden_size, 2 * inner + 2 * grouped + options.heads, Bias::kNo,
                     side_by_side(region, {ranks * inner, ranks * inner, ranks * grouped,
                                           ranks * grouped, ranks * options.heads})));
  norm_ = register_module("norm", std::make_shared<GatedNorm>(inner, region.column()));
  out_proj_ = register_module(
      "out_proj",
      std::make_shared<Linear>(inner, options.hidden_size, Bias::kNo, row_parallel(region)));
  if (options.scaled_by_layers) {
    const auto layers = static_cast<double>(*options.scaled_by_layers);
    out_proj_->begin_with("weight", InitKind::kUniform, 1.0 / std::sqrt(layers));
  }
}

Mamba::Projected Mamba::project(const at::Tensor& x) const {
  const std::int64_t inner = inner_size();
  const auto parts =
      in_proj_->forward(x).split_with_sizes({inner, inner + 2 * group_size(), options_.heads}, 2);
  return {parts[0], parts[1], parts[2]};
}

StateSpaceInputs Mamba::inputs_of(const at::Tensor& mixed, const Projected& projected) const {
  const auto parts = mixed.split_with_sizes({inner_size(), group_size(), group_size()}, 2);
  const auto grouped = [&](const at::Tensor& part) {
    return part.unflatten(2, {options_.groups, options_.state_size});
  };
  const WideScope rates;
  const at::ScalarType wide = wide_dtype(mixed);
  const at::Tensor step = at::softplus(projected.dt.to(wide) + dt_bias_.to(wide));
  return {.x = parts[0].unflatten(2, {options_.heads, options_.head_dim}),
          .dt = step.clamp_min(options_.least_step),
          .a = rate_of_state(a_log_, wide),
          .b = grouped(parts[1]),
          .c = grouped(parts[2]),
          .d = d_.to(wide)};
}

at::Tensor Mamba::normed(const at::Tensor& core, const at::Tensor& gate) const {
  return gated_group_norm(core.flatten(2), gate, norm_->weight, options_.groups, options_.norm_eps);
}

at::Tensor Mamba::forward(const at::Tensor& x, const Documents& documents) {
  using Tensors = std::vector<at::Tensor>;
  const auto mixed = [this](const Tensors& in) {
    grad::refuse_recording("a layer with a state");
    const Documents of_rows{in[1]};
    const Projected projected = project(in[0]);
    const at::Tensor xbc =
        conv1d_->forward(projected.xbc, documents_of(StatePart::kConvolution, of_rows));
    const at::Tensor core = state_space(inputs_of(xbc, projected), options_.chunk,
                                        documents_of(StatePart::kRecurrence, of_rows));
    return normed(core, projected.gate);
  };
  return out_proj_->forward_into(options_.region, *this,
                                 {options_.region.enter(x), documents.starts}, mixed);
}

at::Tensor Mamba::decode(const at::Tensor& x, KvCache& cache) {
  const at::NoGradGuard no_grad;
  cache.advance(x.size(1));
  const Projected projected = project(x);
  const at::Tensor xbc = conv1d_->after(projected.xbc, cache.state.context);
  const at::Tensor core =
      state_space_after(inputs_of(xbc, projected), options_.chunk, cache.state.state);
  return out_proj_->forward(normed(core, projected.gate));
}

}  // namespace tessera::nn
