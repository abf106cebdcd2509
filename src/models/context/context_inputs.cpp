#include "models/context/context_inputs.h"

#include <utility>

#include "base/test_hooks.h"
#include "tessera/error.h"

namespace tessera::models {

std::shared_ptr<const nn::ContextRows> context_rows(const ModelInputs& batch,
                                                    const nn::ContextRegion& region) {
  if (!region.cuts()) return nullptr;
  const std::int64_t positions = batch.input_ids.size(1);
  layout::ContextCut cut =
      batch.cut ? *batch.cut : layout::head_tail(positions, region.axis.size, region.parts);
  TESSERA_CHECK(cut.positions == positions && cut.ranks == region.axis.size, ErrorKind::kFormat,
                "context parallelism: found a cut of ", to_string(cut), " for rows of ", positions,
                " positions over ", region.axis.size, " ranks, expected one of these rows");
  auto rows = nn::context_rows(std::move(cut), region.axis.rank, batch.input_ids.device());
  const auto* hook = test_hooks::context_rows.get();
  return hook != nullptr ? (*hook)(batch, rows) : rows;
}

namespace {

/// Values by token [B*T, K] of own positions.
at::Tensor own_tokens(const at::Tensor& values, const ModelInputs& batch,
                      const nn::ContextRows& rows) {
  TESSERA_CHECK(values.dim() == 2 && values.size(0) == batch.input_ids.numel(), ErrorKind::kFormat,
                "imposed routing: found ", values.sizes(), ", expected experts of ",
                batch.input_ids.numel(), " tokens");
  const at::Tensor by_row =
      values.view({batch.input_ids.size(0), batch.input_ids.size(1), values.size(1)});
  return nn::own_places(by_row, 1, &rows).reshape({-1, values.size(1)});
}

}  // namespace

ModelInputs own_inputs(const ModelInputs& batch, std::shared_ptr<const nn::ContextRows> rows) {
  ModelInputs own = batch;
  if (rows == nullptr) return own;
  const auto places = [&](const at::Tensor& whole) { return nn::own_places(whole, 1, rows.get()); };
  own.input_ids = places(batch.input_ids);
  // A pipeline's rank without the head leaves targets on the host.
  if (batch.targets && batch.targets->device() == rows->places.device()) {
    own.targets = places(*batch.targets);
  }
  if (batch.fillers) own.fillers = places(*batch.fillers);
  if (rows->cut.ranks > 1) {
    for (at::Tensor& indices : own.imposed_routing) indices = own_tokens(indices, batch, *rows);
  }
  own.documents.context = std::move(rows);
  return own;
}

ContextSamples::ContextSamples(const nn::Documents& documents) {
  if (!documents.are_shared()) return;
  auto place = sample_place();
  if (!place) return;
  place->places = documents.context->numbers;
  scope_.emplace(std::move(place));
}

}  // namespace tessera::models
