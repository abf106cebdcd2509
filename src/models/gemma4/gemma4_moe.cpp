#include "models/gemma4/gemma4_moe.h"

#include <cmath>

#include "moe/expert_layout.h"
#include "moe/experts.h"
#include "nn/geglu.h"
#include "nn/rms_norm.h"
#include "tessera/wide_scope.h"

namespace tessera::models {

Gemma4Router::Gemma4Router(const ModelSpec& spec, const Gemma4Experts& experts,
                           const nn::TensorRegion& region)
    : experts_per_token_(experts.top_k_experts), eps_(spec.rms_norm_eps) {
  proj_ = nn::add_projection(
      *this, "proj",
      {spec.hidden_size, experts.num_experts, nn::WeightName::kOwn, nn::inside(region)});
  scale_ = add_parameter("scale", {spec.hidden_size}, nn::norm_weight(region.inside()));
  per_expert_scale_ =
      add_parameter("per_expert_scale", {experts.num_experts}, nn::norm_weight(region.inside()));
}

moe::Routing Gemma4Router::forward(const at::Tensor& x, const std::optional<at::Tensor>& imposed) {
  const double root = 1.0 / std::sqrt(static_cast<double>(x.size(1)));
  // From here on in fp32, whatever the router is stored in: rounded scores choose other experts.
  const WideScope router;
  const at::ScalarType inside = at::promote_types(proj_->weight.scalar_type(), at::kFloat);
  const at::Tensor scaled = nn::plain_rms_norm(x, eps_).to(inside) * scale_ * root;
  moe::Routing routing =
      moe::route(nn::linear(scaled, proj_->weight, {}, inside),
                 {.experts_per_token = experts_per_token_, .normalize = true}, imposed);
  const at::Tensor factors = per_expert_scale_.index_select(0, routing.indices.reshape({-1}));
  routing.weights =
      routing.weights * factors.view(routing.weights.sizes()).to(routing.weights.scalar_type());
  return routing;
}

Gemma4ExpertBank::Gemma4ExpertBank(const ModelSpec& spec, const Gemma4Experts& experts,
                                   const ModelAxes& axes)
    : axes_(axes) {
  const ModelDegrees& degrees = axes.degrees;
  const moe::ExpertShare share{degrees.ep, degrees.etp, degrees.tp};
  const std::int64_t all_inner = experts.moe_intermediate_size;
  const std::int64_t inner = all_inner / degrees.etp;
  const std::int64_t count = experts.num_experts / degrees.ep;
  gate_up_proj_ =
      add_parameter("gate_up_proj", {count, 2 * inner, spec.hidden_size},
                    {.layout = moe::expert_layout(
                         share, 2, {experts.num_experts, 2, all_inner, spec.hidden_size})});
  down_proj_ = add_parameter("down_proj", {count, spec.hidden_size, inner},
                             {.layout = moe::expert_layout(share, 2)});
}

at::Tensor Gemma4ExpertBank::forward(const at::Tensor& x, const moe::Routing& routing) {
  return moe::experts(x, routing, {gate_up_proj_, down_proj_},
                      {moe::of_halves(nn::geglu), axes_.score, axes_.experts});
}

}  // namespace tessera::models
