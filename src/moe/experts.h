// Experts: from tokens and their routing to the weighted sum of what their experts make of them, on
// this rank or on others.
//
// Tokens are ordered by expert, each expert's range is one product, and what comes out is summed
// per token in the order of the experts' numbers: the result of a token does not depend on who else
// is in the batch. Every expert has a gradient, zeros where no token came. Short symbols: M tokens,
// E experts, K experts a token, H hidden, I inner. Next: nn/grouped_linear.h,
// expert_adapter.h, parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moe/expert_adapter.h"
#include "moe/routing.h"
#include "nn/grouped_linear.h"
#include "parallel/axis.h"
#include "parallel/collectives.h"
#include "parallel/transitions.h"

namespace tessera::moe {

/// The rows (token, slot) in the order of their experts, tokens ascending within one.
struct Dispatch {
  at::Tensor slot_of_row;    ///< [M*K] i64: token * K + slot
  at::Tensor row_of_slot;    ///< [M*K] i64, the inverse
  nn::GroupOffsets offsets;  ///< of the experts; empty on a device
  at::Tensor ends = {};      ///< the same on a device, as nn::RowGroups has it
  std::int64_t experts_per_token = 0;
};

/// indices [M, K] as Routing has them; the result's tensors lie beside them. Reads nothing on the
/// host.
Dispatch dispatch(const at::Tensor& indices, std::int64_t experts);

/// x [M, H] -> [M*K, H]: each row its token.
at::Tensor gather_tokens(const at::Tensor& x, const Dispatch& dispatch);

/// rows [M*K, H], weights [M, K] -> [M, H] in the rows' dtype: products in fp32 (or what is wider
/// of the two), added in the order of the slots and rounded once. Without weights (undefined): the
/// sum alone.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch);

/// rows [M*K, H] times the weight [M, K] of each, products as in combine, each rounded to the rows'
/// dtype.
at::Tensor scale_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch);

struct ExpertWeights {
  at::Tensor gate_up;            ///< kOutIn [E, 2I, H], kInOut [E, H, 2I]
  at::Tensor down;               ///< kOutIn [E, H, I], kInOut [E, I, H]
  at::Tensor gate_up_bias = {};  ///< [E, 2I], undefined: none
  at::Tensor down_bias = {};     ///< [E, H], undefined: none
  nn::GroupLayout layout = nn::GroupLayout::kOutIn;
  AdapterWeights gate_up_adapter = {};  ///< beside each product
  AdapterWeights down_adapter = {};
};

/// What an expert does between its two products: [rows, 2I] -> [rows, I].
using Activation = std::function<at::Tensor(const at::Tensor& both)>;
/// gated(gate, up) of the first and the second half of the columns.
Activation of_halves(at::Tensor (*gated)(const at::Tensor& gate, const at::Tensor& up));

enum class Score : std::uint8_t {
  kAfterExperts,   ///< what comes out of an expert is multiplied by the token's weight
  kBeforeExperts,  ///< what goes in (torchtitan's score_before_experts)
};

struct ExpertOptions {
  Activation activation;
  Score score = Score::kAfterExperts;
  /// Over which the experts lie: this rank's are `weights`, E / size of them. Placement of x and of
  /// the result: S(0), tokens of this rank.
  parallel::Axis ep = {};
  std::string name = "experts";  ///< of the layer, in errors about collectives
  /// Called once, while rows travel to their experts (without `ep` at the same place): what a layer
  /// computes beside its experts. Its backward runs while the rows' gradients travel back.
  std::function<void()> meanwhile = {};
};

/// x [M, H] -> [M, H] in x's dtype. Collective over options.ep. On a device the host reads values
/// once (comm/host_read.h) where tokens travel to other ranks, or where libtorch has no grouped
/// product for the dtype of weights or adapters (nn::needs_begins), else never. Errors: kNumeric for scores that
/// are not finite (check_finite), where they are read; else ScoreChecks has them.
at::Tensor experts(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights,
                   const ExpertOptions& options);

// Expert parallelism: rows travel to the ranks that own their experts, and back.
//
// Rank r of the axis owns experts r E/ep to (r + 1) E/ep - 1. Counts go first, an even all-to-all
// of as many numbers as a rank has experts (and one more), on the tensors' device; what arrives is
// read on the host with all else that it must know. Then the rows: they leave in the order of their
// experts, arrive by source rank and expert, and are put in the order of the experts, rows of lower
// ranks first. Nothing is added on the way, in either direction. A rank without tokens, or without
// rows for its experts, takes part all the same, in backward too.
//
// On a device every read of a value is a wait for all that was started before, so a call of
// experts() makes one (comm/host_read.h): how many rows go where, what other ranks send, and whether
// scores are finite. Orders stay on the device. A profile has it as "tessera::host_read". Placement:
// S(0) -> S(0).

/// What is known of a call before anything is sent.
struct DispatchOptions {
  /// This rank's rows require a gradient; in a DispatchPlan: some rank's, so that all meet in
  /// backward.
  bool differentiable = false;
  parallel::Axis axis = {};
  std::string where = {};
};

/// Where the rows of one call go, and how they lie at their experts.
struct DispatchPlan {
  DispatchOptions options;
  parallel::Splits splits;
  /// [rows here] i64: by expert -> as they arrived. Undefined where a rank has one expert: the
  /// orders are the same.
  at::Tensor arrival_of_row;
  at::Tensor row_of_arrival;  ///< its inverse
  nn::RowGroups groups;       ///< of the own experts
};

/// indices [M, K] of all E experts -> [ranks, E / ranks + 1] i64 on their device: how many rows
/// each rank sends to each expert of this one, and whether they require a gradient. Collective.
/// Bytes a rank sends: (ranks - 1) (E / ranks + 1) x 8. Errors: kConfig where E does not divide.
at::Tensor exchange_counts(const at::Tensor& indices, std::int64_t experts,
                           const DispatchOptions& options);

/// offsets: those of all E experts over this rank's rows; received: what exchange_counts gave, on
/// the host. The result's tensors lie on `device`. Errors: kConfig where E does not divide.
DispatchPlan plan_dispatch(const nn::GroupOffsets& offsets, const at::Tensor& received,
                           const DispatchOptions& options, at::Device device);

/// rows [own rows, H], by expert -> [rows of the own experts, H], by expert. Collective. Bytes a
/// rank sends: its rows for other ranks.
at::Tensor to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan);

/// The same in two halves.
struct RowsToExperts {
  parallel::MovingRows rows;
  at::Tensor finish(const DispatchPlan& dispatch_plan);
};
RowsToExperts begin_to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan);

/// The way back. Collective.
at::Tensor from_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan);

}  // namespace tessera::moe
