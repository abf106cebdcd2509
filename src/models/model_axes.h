// ModelAxes: the axes of a mesh that a model's layers communicate over, and the forms that it has;
// made once for a model, copied into its layers. LocalSizes: how much of a layer one rank holds,
// and those axes to the ranks that hold the rest.
//
// Layers are made from LocalSizes, never from the spec's totals, so that a rank's part of a layer
// is the same class with smaller numbers. A rank of a pipeline has some of the layers only:
// stage_layers.h. Next: model_spec.h for what degrees it allows, decoder_layer.h, moe_layer.h,
// ../nn/tensor_region.h.
#pragma once

#include <cstdint>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "models/stage_layers.h"
#include "moe/experts.h"
#include "nn/context_region.h"
#include "nn/tensor_region.h"
#include "parallel/axis.h"

namespace tessera::models {

struct ModelAxes {
  ParallelDims degrees;  ///< those of one rank by default
  nn::TensorRegion tensor;
  nn::ContextRegion context = {};
  parallel::Axis experts;
  moe::Score score = moe::Score::kAfterExperts;
  StagesOfRank stages = {};  ///< of a pipeline; empty: the whole model

  /// Whether no other rank has a part of a layer's work on the same rows, experts apart.
  bool shares_no_layer() const { return tensor.size() == 1 && context.axis.alone(); }

  /// The same with the whole model as one stage.
  StagesOfRank stages_of(std::int64_t layers) const {
    return stages.empty() ? StagesOfRank{{true, {0, layers}, true}} : stages;
  }
};

struct LocalSizes {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t linear_key_heads = 0;  ///< of layers with a state, as the value heads
  std::int64_t linear_value_heads = 0;
  std::int64_t mamba_heads = 0;
  std::int64_t mamba_groups = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t experts = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t shared_intermediate_size = 0;
  std::int64_t vocab_size = 0;
  ModelAxes axes = {};
};

/// The degrees divide the spec's sizes (check_degrees).
inline LocalSizes local_sizes(const ModelSpec& spec, const ModelAxes& axes = {}) {
  const int tp = axes.degrees.tp;
  LocalSizes sizes{.heads = spec.num_attention_heads / tp,
                   .kv_heads = nn::heads_of_rank(spec.num_key_value_heads, tp),
                   .intermediate_size = spec.intermediate_size / tp,
                   .vocab_size = spec.vocab_size / tp,
                   .axes = axes};
  if (spec.delta_net) {
    sizes.linear_key_heads = spec.delta_net->linear_num_key_heads / tp;
    sizes.linear_value_heads = spec.delta_net->linear_num_value_heads / tp;
  }
  if (spec.mamba) {
    sizes.mamba_heads = spec.mamba->mamba_num_heads / tp;
    sizes.mamba_groups = spec.mamba->n_groups / tp;
  }
  if (spec.moe) {
    sizes.experts = spec.moe->num_experts / axes.degrees.ep;
    sizes.moe_intermediate_size = spec.moe->moe_intermediate_size / axes.degrees.etp;
    sizes.shared_intermediate_size = spec.moe->shared_intermediate_size / tp;
  }
  return sizes;
}

}  // namespace tessera::models
