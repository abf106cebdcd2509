// Experts: computes the weighted sum of the experts' results from tokens and their routing, on this
// rank or on others.
//
// Tokens are ordered by expert, each expert's range is one product, and the results are summed per
// token in the order of the experts' numbers: the result of a token does not depend on other tokens
// in the batch. Every expert has a gradient, zeros where no token came. Short symbols: M tokens, E
// experts, K experts a token, H hidden, I inner. Next: nn/grouped_linear.h, expert_exchange.h,
// expert_adapter.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moe/expert_adapter.h"
#include "moe/expert_exchange.h"
#include "moe/routing.h"
#include "nn/grouped_linear.h"
#include "parallel/axis.h"

namespace tessera::moe {

/// The rows (token, slot) in the order of their experts, tokens ascending within one.
struct Dispatch {
  at::Tensor slot_of_row;    ///< [M*K] i64: token * K + slot
  at::Tensor row_of_slot;    ///< [M*K] i64, the inverse
  nn::GroupOffsets offsets;  ///< of the experts; empty on a device
  at::Tensor ends = {};      ///< the same on a device, as nn::RowGroups has it
  std::int64_t experts_per_token = 0;
};

/// indices [M, K] as in Routing; the result's tensors are on their device. Reads nothing on the
/// host.
Dispatch dispatch(const at::Tensor& indices, std::int64_t experts);

/// x [M, H] -> [M*K, H]: each row is its token.
at::Tensor gather_tokens(const at::Tensor& x, const Dispatch& dispatch);

/// rows [M*K, H], weights [M, K] -> [M, H] in the rows' dtype: products in fp32 (or the wider dtype
/// of the two), added in the order of the slots and rounded once. Without weights (undefined): only
/// the sum.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch);

/// rows [M*K, H] times the weight [M, K] of each, products as in combine, each rounded to the rows'
/// dtype.
at::Tensor scale_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch);

struct ExpertWeights {
  at::Tensor gate_up;  ///< kOutIn [E, 2I, H] or, of up alone, [E, I, H]; kInOut [E, H, 2I]
  at::Tensor down;     ///< kOutIn [E, H, I], kInOut [E, I, H]
  at::Tensor gate_up_bias = {};  ///< [E, 2I], undefined: none
  at::Tensor down_bias = {};     ///< [E, H], undefined: none
  nn::GroupLayout layout = nn::GroupLayout::kOutIn;
  AdapterWeights gate_up_adapter = {};  ///< added to each product
  AdapterWeights down_adapter = {};
};

/// Computes an expert's activation between its two products: [rows, 2I], or [rows, I] with only up,
/// -> [rows, I].
using Activation = std::function<nn::ProductInput(const at::Tensor& both)>;
/// Returns gated(gate, up) of the first and the second half of the columns.
Activation of_halves(at::Tensor (*gated)(const at::Tensor& gate, const at::Tensor& up));

enum class Score : std::uint8_t {
  kAfterExperts,   ///< the result of an expert is multiplied by the token's weight
  kBeforeExperts,  ///< its input is (torchtitan's score_before_experts)
};

struct ExpertOptions {
  Activation activation;
  Score score = Score::kAfterExperts;
  /// The axis over which the experts are divided: this rank's are `weights`, E / size of them.
  /// Placement of x and of the result: S(0), tokens of this rank.
  parallel::Axis ep = {};
  std::string name = "experts";  ///< the layer's, in errors about collectives
  /// Called once, while rows travel to their experts (without `ep` at the same place): computes
  /// what a layer has in addition to its experts. Its backward runs while the rows' gradients
  /// travel back, and so do the products for the experts' own weights
  /// (grad::WeightGradient::kUnderExchange).
  std::function<void()> meanwhile = {};
};

/// x [M, H] -> [M, H] in x's dtype. Collective over options.ep. On a device the host reads values
/// once (comm/host_read.h) where tokens travel to other ranks, or where libtorch has no grouped
/// product for the dtype of weights or adapters (nn::needs_begins), else never. Errors: kNumeric
/// for scores that are not finite (check_finite), where they are read; else ScoreChecks has them.
at::Tensor experts(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights,
                   const ExpertOptions& options);

}  // namespace tessera::moe
