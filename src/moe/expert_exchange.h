// Expert parallelism: rows travel to the ranks that own their experts, and back.
//
// Rank r of the axis owns experts r E/ep to (r + 1) E/ep - 1. Counts go first, in an even
// all-to-all of as many numbers as a rank has experts (and one more), on the tensors' device; the
// host reads what arrives together with all else that it must know. Then the rows: they leave in
// the order of their experts, arrive by source rank and expert, and are put in the order of the
// experts, rows of lower ranks first. Nothing is added on the way, in either direction. A rank
// without tokens, or without rows for its experts, also takes part, in backward too.
//
// On a device every read of a value waits for all that was started before, so a call of experts()
// makes one read (comm/host_read.h): how many rows go where, what other ranks send, and whether
// scores are finite. Orders stay on the device. A profile names it "tessera::host_read". Placement:
// S(0) -> S(0). Next: experts.h, ../parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "nn/grouped_linear.h"
#include "parallel/axis.h"
#include "parallel/collectives.h"
#include "parallel/transitions.h"

namespace tessera::moe {

/// The properties of a call that are known before anything is sent.
struct DispatchOptions {
  /// Whether this rank's rows require a gradient; in a DispatchPlan, those of any rank, so that all
  /// ranks take part in backward.
  bool differentiable = false;
  parallel::Axis axis = {};
  std::string where = {};
};

/// The destinations of the rows of one call, and their order at their experts.
struct DispatchPlan {
  DispatchOptions options;
  parallel::Splits splits;
  /// [rows here] i64: by expert -> as they arrived. Undefined where a rank has one expert: the
  /// orders are the same.
  at::Tensor arrival_of_row;
  at::Tensor row_of_arrival;  ///< its inverse
  nn::RowGroups groups;       ///< of this rank's experts
};

/// indices [M, K] of all E experts -> [ranks, E / ranks + 1] i64: how many rows each rank sends to
/// each expert of this one, and whether they require a gradient. Returns it on the host, after the
/// tensors of `with`, which the same wait reads. Collective. Bytes a rank sends: (ranks - 1) (E /
/// ranks + 1) x 8. Errors: kConfig where E does not divide.
std::vector<at::Tensor> exchange_counts(std::vector<at::Tensor> with, const at::Tensor& indices,
                                        std::int64_t experts, const DispatchOptions& options);

/// `offsets` are those of all E experts over this rank's rows; `received` is exchange_counts'
/// result. The tensors of the plan are on `device`. Errors: kConfig where E does not divide.
DispatchPlan plan_dispatch(const nn::GroupOffsets& offsets, const at::Tensor& received,
                           const DispatchOptions& options, at::Device device);

/// rows [this rank's rows, H], by expert -> [rows of its experts, H], by expert. Collective. Bytes
/// a rank sends: its rows for other ranks.
at::Tensor to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan);

/// The same in two halves.
struct RowsToExperts {
  parallel::MovingRows rows;
  at::Tensor finish(const DispatchPlan& dispatch_plan);
};
/// `meanwhile_back` as in begin_all_to_all().
RowsToExperts begin_to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan,
                               std::function<void()> meanwhile_back = {});

/// The way back. Collective.
at::Tensor from_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan);

/// On a device: returns the place of each of the numbers [n] in their ascending, stable order.
at::Tensor order_of(const at::Tensor& numbers);
at::Tensor inverse_of(const at::Tensor& order);

}  // namespace tessera::moe
