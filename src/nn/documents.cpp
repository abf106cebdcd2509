#include "nn/documents.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

#include "tessera/error.h"

namespace tessera::nn {
namespace {

at::Tensor positions_of(const at::Tensor& like) { return at::arange(like.size(1), like.options()); }

/// The own positions of a table of whole rows.
RopeTable own_rows(const RopeTable& whole, const Documents& documents) {
  const ContextRows* rows = documents.context.get();
  return {own_places(whole.cos, 0, rows), own_places(whole.sin, 0, rows)};
}

/// Rows of a table, by their numbers [B, n].
RopeTable picked(const RopeTable& table, const at::Tensor& rows) {
  const at::Tensor flat = rows.reshape({rows.numel()});
  const auto of = [&](const at::Tensor& all) {
    return all.index_select(0, flat).view({rows.size(0), rows.size(1), all.size(1)});
  };
  return {of(table.cos), of(table.sin)};
}

}  // namespace

void check_documents(const at::Tensor& starts, const at::Tensor& input_ids) {
  TESSERA_CHECK(starts.scalar_type() == at::kLong && starts.sizes() == input_ids.sizes(),
                ErrorKind::kFormat, "documents: found starts ", starts.scalar_type(), " of ",
                starts.sizes(), ", expected Long of ", input_ids.sizes(), ", one a token");
  if (!starts.is_cpu() || starts.numel() == 0) return;
  const at::Tensor begins = starts == positions_of(starts);
  const at::Tensor before = at::cat({at::full({starts.size(0), 1}, -1, starts.options()),
                                     starts.narrow(1, 0, starts.size(1) - 1)},
                                    1);
  const at::Tensor wrong = begins.logical_or(starts == before).logical_not();
  if (!wrong.any().item<bool>()) return;
  const at::Tensor place = wrong.nonzero()[0];
  const auto row = place[0].item<std::int64_t>(), position = place[1].item<std::int64_t>();
  throw Error(ErrorKind::kFormat,
              concat("documents: found the start ", starts[row][position].item<std::int64_t>(),
                     " at row ", row, ", position ", position,
                     ", expected the position itself, where a document begins, or the start of the "
                     "position before"));
}

at::Tensor places_of(const Documents& documents, std::int64_t positions, at::Device device) {
  if (documents.are_shared()) return documents.context->places;
  return at::arange(positions, at::TensorOptions(at::kLong).device(device));
}

RopeTable table_of(const Documents& documents, const RopeTable& whole) {
  if (!documents.are_packed()) return own_rows(whole, documents);
  const at::Tensor own = positions_of(documents.starts) - documents.starts;
  return picked(whole, own_places(own, 1, documents.context.get()));
}

RopeTable table_of(const Documents& documents, Rope& rope, const at::Tensor& x) {
  const std::int64_t positions = documents.positions(x);
  const auto longest_short = longest_short_row(rope.options());
  if (!documents.are_packed() || positions <= longest_short.value_or(positions)) {
    return table_of(documents, rope.table(positions, x.scalar_type(), x.device()));
  }
  const RopeTable both = rope.short_and_long_table(positions, x.scalar_type(), x.device());
  const at::Tensor& starts = documents.starts;
  const at::Tensor lengths =
      at::zeros_like(starts).scatter_add(1, starts, at::ones_like(starts)).gather(1, starts);
  const at::Tensor own = positions_of(starts) - starts;
  const at::Tensor rows = at::where(lengths > *longest_short, own + *longest_short, own);
  return picked(both, own_places(rows, 1, documents.context.get()));
}

at::Tensor ends_of_runs(const at::Tensor& flags, const Documents& documents) {
  const at::Tensor position = at::arange(flags.size(1), flags.options().dtype(at::kLong));
  at::Tensor continues = flags;  // from the position before
  if (documents.are_packed()) continues = continues.logical_and(documents.starts != position);
  // For each position the next one, itself included, at which no run continues.
  const at::Tensor border = at::where(continues, flags.size(1), position);
  const at::Tensor next =
      border.numel() == 0 ? border : std::get<0>(at::cummin(border.flip({1}), 1)).flip({1});
  const at::Tensor last = at::full({flags.size(0), 1}, flags.size(1), position.options());
  const at::Tensor behind = at::cat({next, last}, 1).narrow(1, 1, flags.size(1));
  return at::where(flags, behind, position + 1);
}

}  // namespace tessera::nn
