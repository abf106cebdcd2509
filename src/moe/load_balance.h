// Load balance: how many rows each expert has, and the bias that needs no auxiliary loss.
//
// Pure functions of tensors; who sums counts over layers and ranks calls them. All rows count:
// batches have whole rows, and nothing is padded on the way to the experts. Short symbols: M
// tokens, E experts, K experts a token. Next: routing.h, ../train/expert_balance.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::moe {

/// indices [M, K] -> [E] i64: how often each expert was chosen. No gradient.
at::Tensor count_load(const at::Tensor& indices, std::int64_t experts);

/// bias [E] fp32 after a step in which experts had `counts` [E] rows: those below the mean rise by
/// `rate`, those above it fall, and the mean of all changes is taken off.
at::Tensor balanced_bias(const at::Tensor& bias, const at::Tensor& counts, double rate);

/// The busiest expert's rows over the mean; 1 where there are no rows.
double load_max_over_mean(const at::Tensor& counts);

}  // namespace tessera::moe
