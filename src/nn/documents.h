// Documents: several texts packed into one row, which do not see each other.
//
// Attention never crosses a border and positions begin at 0 after it, so that a packed row computes
// what its documents alone would. The packer gives for each position where its document begins; a
// row without borders is one document. Where ranks of a context region share the positions of rows,
// starts are those of whole rows on every rank, and `context` says which positions it has. Short
// symbols: B rows, T positions, D head_dim. Next: rope.h, attention/attention.h,
// ../kernels/seen_blocks.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/context_region.h"
#include "nn/rope.h"

namespace tessera::nn {

struct Documents {
  /// [B, T] i64: for each position the row's position at which its document begins, 0 in the first
  /// one. Undefined: every row is one document.
  at::Tensor starts = {};
  /// Null: this rank has whole rows, which are not cut into parts.
  std::shared_ptr<const ContextRows> context = nullptr;
  bool are_packed() const { return starts.defined(); }
  /// Whether other ranks have positions of the same rows.
  bool are_shared() const { return context != nullptr && context->cut.ranks > 1; }
  /// T of rows of which this rank has x [B, n, ...].
  std::int64_t positions(const at::Tensor& x) const {
    return are_shared() ? context->cut.positions : x.size(1);
  }

  template <class F>
  void visit_tensors(F&& f) {
    if (starts.defined()) f(starts);
  }
};

/// Converts a tensor that may be undefined to what autograd and kernels take.
inline std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// Errors: kFormat for starts that are not of [B, T] ids, not where a document can begin, or not
/// the same within one; on a device they are not checked here (LanguageModel::check_values).
void check_documents(const at::Tensor& starts, const at::Tensor& input_ids);

/// Returns the positions of this rank in a row, [n] i64, of rows of `positions`.
at::Tensor places_of(const Documents& documents, std::int64_t positions, at::Device device);

/// Returns the tables of own positions in their documents, [B, n, D/2]; those of `whole`, of
/// positions 0..T-1, where rows are not packed.
RopeTable table_of(const Documents& documents, const RopeTable& whole);

/// The same for x [B, n, .] of a rope under which rows of different lengths turn differently: each
/// document as a row of its own.
RopeTable table_of(const Documents& documents, Rope& rope, const at::Tensor& x);

/// Returns one past the last key that a position sees, [B, T] i64: its own, or where flags [B, T]
/// bool say so the last of the run of them that it belongs to, within its document.
at::Tensor ends_of_runs(const at::Tensor& flags, const Documents& documents);

}  // namespace tessera::nn
