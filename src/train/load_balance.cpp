#include "train/load_balance.h"

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include "models/expert_bias.h"
#include "moe/load_balance.h"
#include "tessera/error.h"

namespace tessera::train {

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
