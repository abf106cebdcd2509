#include "train/expert_balance.h"

#include <ATen/ATen.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <numeric>

#include "models/expert_bias.h"
#include "moe/routing.h"
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

std::vector<models::BufferSpec> expert_biases_of(const ModelSource& source, double coefficient) {
  if (coefficient == 0) {
    if (!source.folder) return {};
    return stored_expert_biases(*source.folder, source.spec);
  }
  auto biases = models::expert_biases(source.spec);
  TESSERA_CHECK(!biases.empty(), ErrorKind::kConfig, "model.load_balance_coeff: found ",
                coefficient, " for a model without experts, expected 0");
  TESSERA_CHECK(!source.lora, ErrorKind::kConfig, "model.load_balance_coeff: found ", coefficient,
                " where only adapters are trained, whose checkpoints do not hold the bias, "
                "expected 0");
  return biases;
}

void balance_experts(const ShardedBase& model, const std::vector<std::vector<double>>& chosen,
                     double coefficient) {
  const at::NoGradGuard no_grad;
  auto layer = chosen.begin();
  for (BufferView& view : model.buffers()) {
    if (!view.contract->name.ends_with(".expert_bias")) continue;
    TESSERA_INVARIANT(layer != chosen.end(), view.contract->name, " of a layer without counts");
    const at::Tensor counts = at::tensor(*layer++, at::kDouble);
    view.tensor.copy_(moe::balanced_bias(view.tensor, counts, coefficient));
  }
  TESSERA_INVARIANT(layer == chosen.end(), "counts of a layer without a bias");
}

}  // namespace tessera::train
