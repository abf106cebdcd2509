#include "moe/load_balance.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>

namespace tessera::moe {

at::Tensor count_load(const at::Tensor& indices, std::int64_t experts) {
  // Not bincount: on a device it reads its result's size on the host.
  const at::Tensor rows = indices.reshape({-1});
  return at::zeros({experts}, indices.options()).scatter_add_(0, rows, at::ones_like(rows));
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
