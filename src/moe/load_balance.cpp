#include "moe/load_balance.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>

#include "tessera/dtype_watch.h"
#include "tessera/error.h"

namespace tessera::moe {

at::Tensor count_load(const at::Tensor& indices, std::int64_t experts,
                      const std::optional<at::Tensor>& counted) {
  // Not bincount, not masked_select: on a device both read their result's size on the host.
  const at::Tensor ones = at::ones_like(indices);
  const at::Tensor addends = counted ? ones * counted->unsqueeze(1) : ones;
  return at::zeros({experts}, indices.options())
      .scatter_add_(0, indices.reshape({-1}), addends.reshape({-1}));
}

at::Tensor auxiliary_addend(const at::Tensor& probability_sums, const at::Tensor& counts,
                            const AuxiliaryLoss& options) {
  TESSERA_INVARIANT(probability_sums.sizes() == counts.sizes(), "counts of ", counts.sizes(),
                    " for ", probability_sums.sizes());
  const WideScope loss;
  if (options.rows == 0) return probability_sums.sum() * 0;
  const auto rows = static_cast<double>(options.rows);
  const double factor = options.coefficient * static_cast<double>(counts.size(0)) / (rows * rows);
  return (counts.to(probability_sums.scalar_type()) * probability_sums).sum() * factor;
}

at::Tensor balanced_bias(const at::Tensor& bias, const at::Tensor& counts, double rate) {
  const at::Tensor wide = counts.to(at::kDouble);
  const at::Tensor change = at::sign(wide.mean() - wide) * rate;
  return bias + (change - change.mean()).to(bias.scalar_type());
}

double load_max_over_mean(const at::Tensor& counts) {
  const double mean = counts.to(at::kDouble).mean().item<double>();
  return mean == 0 ? 1.0 : counts.max().item<double>() / mean;
}

}  // namespace tessera::moe
