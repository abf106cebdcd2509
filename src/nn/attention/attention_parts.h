// The parts of several forms of attention: their products, and the range of a rope's table that new
// positions turn by. Private to attention's sources. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "nn/linear.h"
#include "nn/rope.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

/// q_proj, k_proj, v_proj and o_proj, registered in `layer`: of AttentionOptions, or of others with
/// heads of such names. q_proj gives `parts` results of a head's size for each head.
template <class Options>
auto add_projections(torch::nn::Module& layer, const Options& options, Bias output_bias,
                     std::int64_t parts = 1) {
  const TensorRegion& region = options.region;
  const std::int64_t q_size = options.heads * options.head_dim;
  const std::int64_t kv_size = options.kv_heads * options.head_dim;
  const auto input = [&](const char* name, std::int64_t out, LinearPlacement placement) {
    return layer.register_module(
        name,
        std::make_shared<Linear>(options.hidden_size, out, options.bias, std::move(placement)));
  };
  // The order is that of the model's parameters.
  auto q = input("q_proj", parts * q_size, column_parallel(region));
  auto k = input("k_proj", kv_size, by_heads(region, options.all_kv_heads));
  auto v = input("v_proj", kv_size, by_heads(region, options.all_kv_heads));
  auto o = layer.register_module(
      "o_proj",
      std::make_shared<Linear>(q_size, options.hidden_size, output_bias, row_parallel(region)));
  return std::tuple(std::move(q), std::move(k), std::move(v), std::move(o));
}

/// Returns the table that x [B, T, .] at the positions from `begin` on turns by, out of a table of
/// `most` positions or of as many as these need: for a cache's capacity it is made once, not at
/// every position.
inline RopeTable turns_from(Rope& rope, std::int64_t begin, std::int64_t most, const at::Tensor& x,
                            at::ScalarType dtype) {
  const std::int64_t end = begin + x.size(1);
  const RopeTable all = rope.table(std::max(most, end), end, dtype, x.device());
  return {all.cos.narrow(0, begin, x.size(1)), all.sin.narrow(0, begin, x.size(1))};
}

/// The output projection of mixed(inputs). A region that is replayed holds all of it, unless ranks
/// talk in the middle of it (`talks`): then only the product.
template <class Projection, class Mixed>
at::Tensor project_out(Projection& o_proj, const TensorRegion& region, torch::nn::Module& layer,
                       const std::vector<at::Tensor>& inputs, const Mixed& mixed, bool talks) {
  if (!talks) return o_proj.forward_into(region, layer, inputs, mixed);
  return o_proj.forward_into(region, layer, {mixed(inputs)},
                             [](const std::vector<at::Tensor>& in) { return in[0]; });
}

}  // namespace tessera::nn
