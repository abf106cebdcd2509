// ContextRegion: the ranks of the context-parallel axis, which share the positions of the same
// rows. ContextRows: which positions of the rows of one forward this rank has.
//
// All of a layer but attention computes with the positions of this rank, [B, n, .] with n = T /
// ranks. Attention alone sees the others, in one of two forms (ContextForm). What is a property of
// whole rows (documents, masks) stays of whole rows on every rank. Next: documents.h,
// attention/context_attention.h, ../layout/context_cut.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "layout/context_cut.h"
#include "layout/parallel_dims.h"
#include "parallel/axis.h"

namespace tessera::nn {

/// A property of a model.
struct ContextRegion {
  parallel::Axis axis = {};
  ContextForm form = ContextForm::kGather;
  int parts = 1;  ///< of a row; 1: it is not cut
  bool cuts() const { return axis.size > 1 || parts > 1; }
};

/// A property of the rows of one forward, the same for every layer.
struct ContextRows {
  layout::ContextCut cut;
  at::Tensor places;  ///< [n] i64 on the rows' device: the own positions, in their order
  std::shared_ptr<const std::vector<std::int64_t>> numbers;  ///< the same on the host
};

/// Returns the rows of this rank. `device`: that of the rows.
std::shared_ptr<const ContextRows> context_rows(layout::ContextCut cut, int rank,
                                                at::Device device);

/// Returns the own positions of x, whose dim `dim` has those of whole rows; x itself where one rank
/// has them all (null: rows are not cut).
at::Tensor own_places(const at::Tensor& x, std::int64_t dim, const ContextRows* rows);

}  // namespace tessera::nn
