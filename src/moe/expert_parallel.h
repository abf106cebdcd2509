// Expert parallelism: rows travel to the ranks that own their experts, and back.
//
// Rank r of the axis owns experts r E/ep to (r + 1) E/ep - 1. Counts go first, an even all-to-all
// of as many numbers as a rank has experts (and one more): the layer's one wait of the host for the
// others. Then the rows: they leave in the order of their experts, arrive by source rank and
// expert, and are put in the order of the experts, rows of lower ranks first. Nothing is added on
// the way, in either direction. A rank without tokens, or without rows for its experts, takes part
// all the same, in backward too. Placement: S(0) -> S(0). Next: experts.h,
// ../parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "nn/grouped_products.h"
#include "parallel/axis.h"
#include "parallel/exchange.h"

namespace tessera::moe {

/// Where the rows of one call go, and how they lie at their experts.
struct Journey {
  parallel::Axis axis;
  parallel::Splits splits;
  /// [rows here] i64: by expert -> as they arrived. Undefined where a rank has one expert: the
  /// orders are the same.
  at::Tensor arrival_of_row;
  at::Tensor row_of_arrival;  ///< its inverse
  nn::GroupOffsets offsets;   ///< of the own experts
  /// Some rank's rows require a gradient: then every rank's do, for all to meet in backward.
  bool differentiable = false;
  std::string where;
};

/// offsets: those of all E experts over `rows`. Collective. Errors: kConfig where E does not
/// divide.
Journey plan_journey(const nn::GroupOffsets& offsets, const at::Tensor& rows,
                     const parallel::Axis& axis, const std::string& where);

/// rows [own rows, H], by expert -> [rows of the own experts, H], by expert. Collective. Bytes a
/// rank sends: its rows for other ranks.
at::Tensor to_experts(const at::Tensor& rows, const Journey& journey);

/// The way back. Collective.
at::Tensor from_experts(const at::Tensor& rows, const Journey& journey);

}  // namespace tessera::moe
