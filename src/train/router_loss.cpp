#include "train/router_loss.h"

#include <ATen/ATen.h>

#include <numeric>

#include "tessera/error.h"
#include "train/step.h"

namespace tessera::train {

double aux_loss_coef(const std::optional<double>& asked, const models::ModelSpec& spec) {
  if (!asked)
    return spec.moe && spec.moe->output_router_logits ? spec.moe->router_aux_loss_coef : 0;
  TESSERA_CHECK(*asked == 0 || spec.moe, ErrorKind::kConfig, "model.aux_loss_coef: found ", *asked,
                " for a model without experts, expected 0");
  return *asked;
}

at::Tensor auxiliary_loss(const ShardedBase& model, const std::vector<models::RouterLoad>& loads,
                          std::int64_t experts_per_token) {
  at::Tensor counts = loads.front().counts;
  at::Tensor probabilities = loads.front().probabilities;
  for (std::size_t i = 1; i < loads.size(); ++i) {
    counts = counts + loads[i].counts;
    probabilities = probabilities + loads[i].probabilities;
  }
  const at::Tensor mine = counts.to(at::kCPU, at::kDouble).contiguous();
  const auto* begin = mine.const_data_ptr<double>();
  const auto chosen = sum_over_ranks(model, RankSum::kRouterLoad, {begin, begin + mine.numel()});
  // Rows of the pooled layers: every token of every layer chose as many experts.
  const double rows =
      std::accumulate(chosen.begin(), chosen.end(), 0.0) / static_cast<double>(experts_per_token);
  const auto experts = static_cast<double>(chosen.size());
  const at::Tensor share = at::tensor(chosen, at::kDouble) * (experts / (rows * rows));
  return (probabilities * share.to(probabilities.options())).sum();
}

}  // namespace tessera::train
