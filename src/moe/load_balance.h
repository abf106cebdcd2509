// Load balance: how many rows each expert has, the auxiliary loss, and the bias that needs none.
//
// Pure functions of tensors; who sums counts over layers and ranks calls them. Short symbols: M
// tokens, E experts, K experts a token, N rows (tokens x layers) of a micro-batch on all ranks.
// Next: routing.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::moe {

/// indices [M, K] -> [E] i64: how often each expert was chosen. Tokens whose `counted` [M] bool is
/// false (padding) are left out. No gradient.
at::Tensor count_load(const at::Tensor& indices, std::int64_t experts,
                      const std::optional<at::Tensor>& counted = std::nullopt);

struct AuxiliaryLoss {
  double coefficient = 0;
  std::int64_t rows = 0;  ///< N
};

/// A rank's addend of coefficient * E * sum_e (counts_e / N) (probability_sums_e / N).
/// probability_sums [E]: of the rows of this rank alone, over all layers, fp32; counts [E]: of all
/// ranks and layers, without gradient. Placement: P over the ranks whose rows are different ones;
/// where ranks share rows only the first may add. No rows at all: zero.
at::Tensor auxiliary_addend(const at::Tensor& probability_sums, const at::Tensor& counts,
                            const AuxiliaryLoss& options);

/// bias [E] fp32 after a step in which experts had `counts` [E] rows: those below the mean rise by
/// `rate`, those above it fall, and the mean of all changes is taken off.
at::Tensor balanced_bias(const at::Tensor& bias, const at::Tensor& counts, double rate);

/// The busiest expert's rows over the mean; 1 where there are no rows.
double load_max_over_mean(const at::Tensor& counts);

}  // namespace tessera::moe
