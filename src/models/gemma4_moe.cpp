#include "models/gemma4_moe.h"

#include <cmath>

#include "moe/experts.h"
#include "nn/geglu.h"
#include "nn/parameter.h"
#include "nn/rms_norm.h"
#include "tessera/dtype_watch.h"

namespace tessera::models {

Gemma4Router::Gemma4Router(const ModelSpec& spec, const Gemma4Experts& experts)
    : experts_per_token_(experts.top_k_experts), eps_(spec.rms_norm_eps) {
  proj_ = nn::add_projection(*this, "proj", {spec.hidden_size, experts.num_experts});
  scale_ = register_parameter("scale", nn::empty_parameter({spec.hidden_size}));
  per_expert_scale_ =
      register_parameter("per_expert_scale", nn::empty_parameter({experts.num_experts}));
}

moe::Routing Gemma4Router::forward(const at::Tensor& x, const std::optional<at::Tensor>& imposed) {
  const double root = 1.0 / std::sqrt(static_cast<double>(x.size(1)));
  // From here on the router's own dtypes count: fp32 where the checkpoint stores it so.
  const WideScope router;
  const at::Tensor scaled = nn::plain_rms_norm(x, eps_) * scale_ * root;
  moe::Routing routing =
      moe::route(proj_->forward(scaled),
                 {.experts_per_token = experts_per_token_, .normalize = true}, imposed);
  const at::Tensor factors = per_expert_scale_.index_select(0, routing.indices.reshape({-1}));
  routing.weights =
      routing.weights * factors.view(routing.weights.sizes()).to(routing.weights.scalar_type());
  return routing;
}

Gemma4ExpertBank::Gemma4ExpertBank(const ModelSpec& spec, const Gemma4Experts& experts) {
  const std::int64_t inner = experts.moe_intermediate_size;
  gate_up_proj_ = register_parameter(
      "gate_up_proj", nn::empty_parameter({experts.num_experts, 2 * inner, spec.hidden_size}));
  down_proj_ = register_parameter(
      "down_proj", nn::empty_parameter({experts.num_experts, spec.hidden_size, inner}));
}

at::Tensor Gemma4ExpertBank::forward(const at::Tensor& x, const moe::Routing& routing) {
  return moe::experts(x, routing, {gate_up_proj_, down_proj_},
                      {.activation = moe::of_halves(nn::geglu)});
}

}  // namespace tessera::models
