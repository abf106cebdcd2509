#include "models/context/context_work.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <optional>

#include "kernels/seen_blocks.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Holds what a layer's mask hides besides later keys and other documents.
struct ContextMask {
  std::int64_t window = kernels::kNoWindow;
  std::int64_t chunk = 0;  ///< 0: none
  auto operator<=>(const ContextMask&) const = default;
};

/// Returns the masks that occur, each with the dims of a pair summed over its layers.
std::map<ContextMask, std::int64_t> masks_of(const ModelSpec& spec) {
  std::map<ContextMask, std::int64_t> masks;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    if (spec.is_linear(layer) || spec.sees_nothing(layer)) continue;
    const LayerAttention attention = attention_of(spec, layer);
    ContextMask mask{attention.window.value_or(kernels::kNoWindow)};
    if (spec.is_chunked(layer)) mask.chunk = spec.chunked->attention_chunk_size;
    masks[mask] += attention.dims;
  }
  return masks;
}

/// Returns the first key that each query sees, [B, T] i64, B = 1 where rows are not packed; none
/// where that is the row's first.
std::optional<at::Tensor> begins_of(const at::Tensor& starts, std::int64_t positions,
                                    std::int64_t chunk) {
  if (chunk == 0) return starts.defined() ? std::optional(starts) : std::nullopt;
  const at::Tensor of_documents =
      starts.defined() ? starts.contiguous() : at::zeros({1, positions}, at::kLong);
  at::Tensor begins = at::empty_like(of_documents);
  const auto* start = of_documents.const_data_ptr<std::int64_t>();
  auto* begin = begins.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < begins.size(0); ++row) {
    for (std::int64_t i = 0, first = 0; i < positions; ++i) {
      if (*start == i || i - first == chunk) first = i;
      *begin++ = first;
      ++start;
    }
  }
  return begins;
}

/// Returns the pairs that blocks of the queries in `part` compute.
double pairs_of(const layout::Range& part, std::int64_t rows, kernels::SeenKeys seen) {
  constexpr std::int64_t kBlock = 64;  // of most kernels: cpu/attention.cpp, windowed_attention.cpp
  if (seen.begins) seen.begins = seen.begins->narrow(1, part.begin, part.size());
  const kernels::SeenSizes sizes{.rows = rows,
                                 .queries = part.size(),
                                 .keys = part.end,
                                 .first = part.begin,
                                 .block = std::min(kBlock, part.size())};
  double pairs = 0.0;
  for (const kernels::SeenBlock& block : kernels::seen_blocks(sizes, seen)) {
    pairs += static_cast<double>(block.rows.size() * block.queries.size() * block.keys.size());
  }
  return pairs;
}

}  // namespace

std::vector<double> context_work(const ModelSpec& spec, std::int64_t positions, std::int64_t rows,
                                 int parts, const at::Tensor& starts) {
  TESSERA_INVARIANT(parts > 0 && positions % parts == 0, "parts do not divide a row");
  TESSERA_INVARIANT(!starts.defined() || (starts.is_cpu() && starts.dim() == 2 &&
                                          starts.size(0) == rows && starts.size(1) == positions),
                    "starts of other rows");
  // Rows of one document each are alike: one is counted for all.
  const std::int64_t distinct = starts.defined() ? rows : 1;
  const double alike = starts.defined() ? 1.0 : static_cast<double>(rows);
  const layout::ContextCut cut{.positions = positions,
                               .owner = std::vector<int>(static_cast<std::size_t>(parts), 0)};
  std::vector<double> work(cut.owner.size(), 0.0);
  if (positions == 0 || distinct == 0) return work;
  for (const auto& [mask, dims] : masks_of(spec)) {
    const kernels::SeenKeys seen{.begins = begins_of(starts, positions, mask.chunk),
                                 .window = mask.window};
    for (int number = 0; number < parts; ++number) {
      work[static_cast<std::size_t>(number)] +=
          alike * static_cast<double>(dims) * pairs_of(cut.part(number), distinct, seen);
    }
  }
  return work;
}

layout::ContextCut context_cut(const ModelSpec& spec, int ranks, int parts, std::int64_t positions,
                               const at::Tensor& starts) {
  layout::check_cut(positions, ranks, parts);
  const bool is_readable = starts.defined() && starts.is_cpu();
  if (!is_readable || parts <= 2 * ranks) return layout::head_tail(positions, ranks, parts);
  const auto work = context_work(spec, positions, starts.size(0), parts, starts);
  return layout::by_work(positions, ranks, work);
}

}  // namespace tessera::models
