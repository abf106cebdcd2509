// sum / factor rounded once, the slow way: what gradients over the divide factor are compared with.
#pragma once

#include <ATen/ATen.h>

namespace tessera::test {

/// sum / divisor, rounded once. Devices multiply by a rounded reciprocal where the divisor is a
/// number of the host.
inline at::Tensor over(const at::Tensor& sum, double divisor) {
  return sum.div(at::full({}, divisor, sum.options()));
}

/// The value of `dtype` that is nearest to sum / factor (in fp64), ties to even.
inline at::Tensor divided(const at::Tensor& sum, double factor, at::ScalarType dtype) {
  const auto exact = over(sum.to(at::kDouble), factor);
  auto nearest = exact.to(dtype);
  if (dtype == at::kDouble || dtype == at::kFloat) return nearest;
  // ATen goes by way of fp32, which may have made a tie of what was none: then a neighbour is
  // nearer.
  const auto error = [&](const at::Tensor& value) { return (value.to(at::kDouble) - exact).abs(); };
  for (const int step : {-1, 1}) {
    const auto neighbour = nearest.view(at::kShort).add(step).view(dtype);
    const auto nearer = error(neighbour).lt(error(nearest)).logical_and(nearest.isfinite());
    nearest = at::where(nearer, neighbour, nearest);
  }
  return nearest;
}

}  // namespace tessera::test
