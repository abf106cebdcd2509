#include "nn/documents.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <tuple>

#include "tessera/error.h"

namespace tessera::nn {
namespace {

at::Tensor positions_of(const at::Tensor& like) { return at::arange(like.size(1), like.options()); }

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

RopeTable table_of(const Documents& documents, const RopeTable& whole) {
  if (!documents.are_packed()) return whole;
  const at::Tensor& starts = documents.starts;
  const at::Tensor own = (positions_of(starts) - starts).reshape({starts.numel()});
  const auto picked = [&](const at::Tensor& table) {
    return table.index_select(0, own).view({starts.size(0), starts.size(1), table.size(1)});
  };
  return {picked(whole.cos), picked(whole.sin)};
}

at::Tensor ends_of_runs(const at::Tensor& flags, const Documents& documents) {
  const at::Tensor position = at::arange(flags.size(1), flags.options().dtype(at::kLong));
  at::Tensor goes_on = flags;  // from the position before
  if (documents.are_packed()) goes_on = goes_on.logical_and(documents.starts != position);
  // Of each position the next one at or behind it at which no run goes on.
  const at::Tensor border = at::where(goes_on, flags.size(1), position);
  const at::Tensor next =
      border.numel() == 0 ? border : std::get<0>(at::cummin(border.flip({1}), 1)).flip({1});
  const at::Tensor last = at::full({flags.size(0), 1}, flags.size(1), position.options());
  const at::Tensor behind = at::cat({next, last}, 1).narrow(1, 1, flags.size(1));
  return at::where(flags, behind, position + 1);
}

}  // namespace tessera::nn
