#include "models/moe_layer.h"

#include <ATen/ops/zeros.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/family.h"
#include "moe/experts.h"
#include "moe/routing.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/placement.h"
#include "tessera/wide_scope.h"

namespace tessera::models {
namespace {

// Where the weights of experts lie: over the ranks that share the experts of a layer (ep), and over
// those that share the inner size of each (etp). Experts that are not cut over the tp of the layers
// around see a part of the tokens.

/// Without ep the ranks of the sparse mesh are those of the dense one.
ParameterLayout over_experts(const ParallelDims& share) {
  ParameterLayout layout;
  if (share.ep > 1) {
    layout.mesh = MeshKind::kSparse;
    layout.axes.push_back(AxisPlacement::shard(axis::kExpert, share.ep, 0));
  } else if (share.etp == 1 && share.tp > 1) {
    layout.axes.push_back(AxisPlacement::partial(axis::kTensor, share.tp));
  }
  return layout;
}

std::string_view inner_axis(const ParallelDims& share) {
  return share.ep > 1 ? axis::kExpertTensor : axis::kTensor;
}

/// A weight whose inner size is dim `inner_dim` of `sharded_shape`, or of its own shape where
/// that is empty.
ParameterLayout expert_layout(const ParallelDims& share, int inner_dim,
                              std::vector<std::int64_t> sharded_shape = {}) {
  ParameterLayout layout = over_experts(share);
  if (share.etp == 1) return layout;
  layout.sharded_shape = std::move(sharded_shape);
  layout.axes.push_back(AxisPlacement::shard(inner_axis(share), share.etp, inner_dim));
  return layout;
}

/// The layout of an expert's addend: whole on every rank that shares the expert, added by one.
ParameterLayout expert_sum_layout(const ParallelDims& share) {
  ParameterLayout layout = over_experts(share);
  if (share.etp > 1) layout.axes.push_back(AxisPlacement::partial(inner_axis(share), share.etp));
  return layout;
}

/// Declares gate and up, which one product computes, along `dim` of its matrix.
layout::FusedMatrices gate_and_up(const MoeSpec& moe, int dim) {
  if (!moe.is_gated()) return {};
  const bool in_turn = moe.activation == ExpertActivation::kClampedSwiglu;
  using Order = layout::FusedMatrices::Order;
  return {.count = 2, .dim = dim, .order = in_turn ? Order::kInTurn : Order::kSideBySide};
}

/// The adapter of the product whose columns are cut. As a column-parallel layer's (nn/linear.h): A
/// sees all of the inputs, and its gradient is an addend of each rank that has some of the outputs.
moe::AdapterPlacement gate_up_adapters(const ParallelDims& share, const MoeSpec& moe,
                                       std::int64_t rank) {
  const bool as_they_stand = moe.activation == ExpertActivation::kClampedSwiglu || !moe.is_gated();
  return {expert_sum_layout(share),
          as_they_stand
              ? expert_layout(share, 1)
              : expert_layout(share, 2, {moe.num_experts, 2, moe.moe_intermediate_size, rank}),
          gate_and_up(moe, 0)};
}

/// The adapter of the product whose inputs are cut: the first factor's results are addends, so B's
/// are too, and B's gradient is one.
moe::AdapterPlacement down_adapters(const ParallelDims& share) {
  return {expert_layout(share, 2), expert_sum_layout(share)};
}

moe::AdapterWeights weights_of(const std::shared_ptr<moe::ExpertAdapter>& adapter) {
  return adapter ? adapter->weights() : moe::AdapterWeights{};
}

moe::Scoring scoring_of(ExpertScores scores) {
  switch (scores) {
    case ExpertScores::kSoftmaxOfAll:
      return moe::Scoring::kSoftmaxThenTopK;
    case ExpertScores::kSoftmaxOfChosen:
      return moe::Scoring::kTopKThenSoftmax;
    case ExpertScores::kSigmoidOfChosen:
      return moe::Scoring::kTopKThenSigmoid;
    case ExpertScores::kSigmoid:
      return moe::Scoring::kSigmoid;
  }
  TESSERA_INVARIANT(false, "scores that no routing is made of");
}

moe::RouteOptions route_options(const MoeSpec& moe) {
  moe::RouteOptions options;
  options.experts_per_token = moe.experts_per_token;
  options.scoring = scoring_of(moe.scores);
  options.normalize = moe.norm_topk_prob;
  options.scaling_factor = moe.routed_scaling_factor;
  options.groups = moe.n_group;
  options.top_groups = moe.topk_group;
  return options;
}

moe::Activation activation_of(const MoeSpec& moe) {
  if (moe.activation == ExpertActivation::kSwiglu) {
    return [](const at::Tensor& both) {
      return nn::ProductInput(nn::ProductInput::Kind::kSwigluHalves, both);
    };
  }
  if (moe.activation == ExpertActivation::kGeglu) return moe::of_halves(nn::geglu);
  if (!moe.is_gated()) return nn::relu_squared;
  return [clamp = nn::ClampedSwiglu{moe.swiglu_alpha, moe.swiglu_limit}](const at::Tensor& both) {
    return nn::clamped_swiglu(both, clamp);
  };
}

}  // namespace

RouterLoad load_of(const moe::Routing& routing, RouterStatistics statistics,
                   const std::optional<at::Tensor>& fillers) {
  RouterLoad load;
  if (statistics == RouterStatistics::kNone) return load;
  const std::int64_t experts = routing.probabilities.size(1);
  // Fillers choose an expert past the last one, which does not exist.
  load.counts = fillers
                    ? moe::count_load(routing.indices.masked_fill(*fillers, experts), experts + 1)
                          .narrow(0, 0, experts)
                          .clone()
                    : moe::count_load(routing.indices, experts);
  if (statistics == RouterStatistics::kAndProbabilities) {
    const WideScope probabilities;
    load.probabilities =
        (fillers ? routing.probabilities.masked_fill(*fillers, 0) : routing.probabilities).sum(0);
  }
  return load;
}

ExpertRouter::ExpertRouter(const ModelSpec& spec, std::int64_t number,
                           const nn::TensorRegion& region)
    : moe_(*spec.moe), number_(number) {
  // On shards of the tokens, or in front of addends: the gradient is Partial in every layout.
  weight_ =
      add_parameter("weight", {moe_.num_experts, spec.hidden_size}, {.layout = region.inside()});
  if (moe_.has_stored_bias()) {
    stored_bias_ = register_buffer(HasExpertBias::kStoredName,
                                   at::zeros({moe_.num_experts}, at::TensorOptions(at::kFloat)));
  }
  if (moe_.router_bias) {
    bias_ = add_parameter("bias", {moe_.num_experts},
                          nn::bias_of_layer(region.inside(), nn::InitKind::kNormal));
  }
}

at::Tensor ExpertRouter::scores(const at::Tensor& x) const {
  const WideScope router;
  const at::ScalarType inside = moe_.router_dtype == RouterDtype::kFloat32
                                    ? at::promote_types(weight_.scalar_type(), at::kFloat)
                                    : weight_.scalar_type();
  return nn::linear(x.to(inside), weight_, bias_, inside);
}

moe::Routing ExpertRouter::route(const at::Tensor& scores, const std::optional<at::Tensor>& imposed,
                                 const at::Tensor& bias) const {
  moe::RouteOptions options = route_options(moe_);
  options.expert_bias = moe_.has_stored_bias() ? stored_bias_ : bias;
  options.layer = number_;
  moe::Routing routing = moe::route(scores, options, imposed);
  if (moe_.wide_weights) return routing;
  const WideScope weights;
  routing.weights = routing.weights.to(scores.scalar_type());
  return routing;
}

ExpertBank::ExpertBank(const ModelSpec& spec, const LocalSizes& sizes)
    : moe_(*spec.moe), family_(spec.family), axes_(sizes.axes) {
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t inner = sizes.moe_intermediate_size;
  const std::int64_t count = sizes.experts;
  const ParallelDims& share = axes_.degrees;
  if (!moe_.is_gated()) {
    add_without_gate(count, hidden, inner);
  } else if (moe_.layout != ExpertLayout::kInOut) {
    nn::Declaration gate_up{
        .layout =
            expert_layout(share, 2, {moe_.num_experts, 2, moe_.moe_intermediate_size, hidden}),
        .fused = gate_and_up(moe_, 0)};
    nn::Declaration down{.layout = expert_layout(share, 2)};
    if (moe_.layout == ExpertLayout::kOutIn) {
      const MoeNames& names = traits(spec.family).moe_names;
      gate_up.parts = {names.gate, names.up};
      down.parts = {names.down};
    }
    gate_up_proj_ = add_parameter("gate_up_proj", {count, 2 * inner, hidden}, std::move(gate_up));
    down_proj_ = add_parameter("down_proj", {count, hidden, inner}, std::move(down));
  } else {
    // Columns in turn are cut as they stand, halves each by itself.
    const ParameterLayout columns =
        moe_.activation == ExpertActivation::kClampedSwiglu
            ? expert_layout(share, 2)
            : expert_layout(share, 3, {moe_.num_experts, hidden, 2, moe_.moe_intermediate_size});
    gate_up_proj_ = add_parameter("gate_up_proj", {count, hidden, 2 * inner},
                                  {.layout = columns, .fused = gate_and_up(moe_, 1)});
    down_proj_ =
        add_parameter("down_proj", {count, inner, hidden}, {.layout = expert_layout(share, 1)});
  }
  if (!moe_.expert_bias) return;
  gate_up_proj_bias_ = add_parameter("gate_up_proj_bias", {count, 2 * inner},
                                     nn::bias_of_layer(expert_layout(share, 1)));
  down_proj_bias_ =
      add_parameter("down_proj_bias", {count, hidden}, nn::bias_of_layer(expert_sum_layout(share)));
}

void ExpertBank::add_without_gate(std::int64_t count, std::int64_t hidden, std::int64_t inner) {
  TESSERA_INVARIANT(moe_.layout == ExpertLayout::kOutIn && !moe_.expert_bias,
                    "experts without a gate in another layout, or with biases");
  const MoeNames& names = traits(family_).moe_names;
  const ParallelDims& share = axes_.degrees;
  gate_up_proj_ = add_parameter("up_proj", {count, inner, hidden},
                                {.layout = expert_layout(share, 1), .parts = {names.up}});
  down_proj_ = add_parameter("down_proj", {count, hidden, inner},
                             {.layout = expert_layout(share, 2), .parts = {names.down}});
}

at::Tensor ExpertBank::forward(const at::Tensor& x, const moe::Routing& routing,
                               std::function<void()> meanwhile) {
  const auto layout =
      moe_.layout == ExpertLayout::kInOut ? nn::GroupLayout::kInOut : nn::GroupLayout::kOutIn;
  moe::ExpertWeights weights{gate_up_proj_,
                             down_proj_,
                             gate_up_proj_bias_,
                             down_proj_bias_,
                             layout,
                             weights_of(gate_up_adapter_),
                             weights_of(down_adapter_)};
  if (axes_.degrees.etp > 1 && moe_.expert_bias) {
    weights.down_bias = parallel::only_first(down_proj_bias_, axes_.tensor.axis());
  }
  moe::ExpertOptions options{activation_of(moe_), axes_.score, axes_.experts};
  if (moe_.scores_before_experts) options.score = moe::Score::kBeforeExperts;
  options.meanwhile = std::move(meanwhile);
  if (axes_.experts.alone()) options.name = name_;  // collectives are of all layers alike
  return moe::experts(x, routing, weights, options);
}

void ExpertBank::add_adapter(const std::string& product, const nn::LoraOptions& options) {
  const bool is_down = product == "down_proj";
  std::shared_ptr<moe::ExpertAdapter>& adapter = is_down ? down_adapter_ : gate_up_adapter_;
  TESSERA_INVARIANT(is_down || product == (moe_.is_gated() ? "gate_up_proj" : "up_proj"), product,
                    " is no product of experts");
  TESSERA_INVARIANT(!adapter && options.dropout == 0.0, "an adapter of ", options.layer,
                    " that is the second, or drops");
  const at::Tensor& matrices = is_down ? down_proj_ : gate_up_proj_;
  const int in_dim = moe_.layout == ExpertLayout::kInOut ? 1 : 2;
  const moe::AdapterSizes sizes{matrices.size(0), matrices.size(in_dim), matrices.size(3 - in_dim),
                                options.rank};
  adapter =
      register_module(product, std::make_shared<moe::ExpertAdapter>(
                                   sizes,
                                   is_down ? down_adapters(axes_.degrees)
                                           : gate_up_adapters(axes_.degrees, moe_, options.rank),
                                   options.scale));
}

MoeLayer::MoeLayer(const ModelSpec& spec, std::int64_t number, const LocalSizes& sizes)
    : HasExpertBias(*spec.moe), tokens_(sizes.axes) {
  const nn::TensorRegion& region = sizes.axes.tensor;
  router_ = register_module(std::string(traits(spec.family).router_module),
                            std::make_shared<ExpertRouter>(spec, number, region));
  experts_ = register_module("experts", std::make_shared<ExpertBank>(spec, sizes));
  if (sizes.shared_intermediate_size == 0) return;
  shared_experts_ = register_module(
      std::string(traits(spec.family).shared_module),
      std::make_shared<nn::Mlp>(spec.hidden_size, sizes.shared_intermediate_size, nn::Bias::kNo,
                                region, spec.moe->is_gated() ? nn::Gate::kSilu : nn::Gate::kNone));
  if (!spec.moe->shared_gate) return;
  // On shards of the tokens, or in front of addends, as the router.
  shared_gate_ = register_module(
      std::string(traits(spec.family).shared_gate_module),
      std::make_shared<nn::Linear>(spec.hidden_size, 1, nn::Bias::kNo, nn::inside(region)));
}

at::Tensor MoeLayer::shared(const at::Tensor& x, const at::Tensor& entered) {
  // With a sum at the exit the shared experts' addends go along.
  const bool is_addend = tokens_.sums_at_exit();
  const at::Tensor given =
      is_addend ? shared_experts_->addend(entered) : shared_experts_->forward(x);
  return shared_gate_ ? shared_gate_->forward(is_addend ? entered : x).sigmoid() * given : given;
}

MoeLayer::Output MoeLayer::forward(const at::Tensor& x, const RoutingRequest& request) {
  const at::Tensor entered = tokens_.enter(x);
  const at::Tensor routed = tokens_.routed(
      x, entered,
      shared_experts_ ? ExpertTokens::SharedExperts::kPresent : ExpertTokens::SharedExperts::kNone);
  const moe::Routing routing = router_->route(
      router_->scores(routed), tokens_.values_of_routed(request.imposed, x.size(0), x.size(1)),
      expert_bias());
  at::Tensor of_shared;
  const auto run_shared = [&] { of_shared = shared(x, entered); };
  const at::Tensor given = experts_->forward(
      tokens_.sent(routed), tokens_.sent(routing),
      shared_experts_ ? std::function<void()>(run_shared) : std::function<void()>());
  at::Tensor y = tokens_.returned(given, entered.sizes());
  if (shared_experts_) y = y + of_shared;
  return {tokens_.leave(y), tokens_.counted(load_of(
                                routing, request.statistics,
                                tokens_.values_of_routed(request.fillers, x.size(0), x.size(1))))};
}

}  // namespace tessera::models
