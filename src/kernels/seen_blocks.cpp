#include "kernels/seen_blocks.h"

#include <ATen/ops/arange.h>

#include <algorithm>

namespace tessera::kernels {
namespace {

/// Returns [B, T] with contiguous rows; none where there is none, or the host cannot read it.
std::optional<at::Tensor> readable(const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->device().is_cpu()) return std::nullopt;
  return tensor->contiguous();
}

const std::int64_t* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? static_cast<const std::int64_t*>(tensor->const_data_ptr()) : nullptr;
}

/// Returns the part of `keys` that `queries` of one row see.
layout::Range narrowed(layout::Range keys, const layout::Range& queries, const std::int64_t* begins,
                       const std::int64_t* ends) {
  if (begins != nullptr) {
    const std::int64_t first = *std::min_element(begins + queries.begin, begins + queries.end);
    keys.begin = std::max(keys.begin, first / kFirstKeys * kFirstKeys);
  }
  if (ends != nullptr) keys.end = *std::max_element(ends + queries.begin, ends + queries.end);
  return keys;
}

}  // namespace

std::vector<SeenBlock> seen_blocks(const SeenSizes& sizes, const SeenKeys& seen) {
  const auto host_begins = readable(seen.begins), host_ends = readable(seen.ends);
  const std::int64_t* begins = data_of(host_begins);
  const std::int64_t* ends = data_of(host_ends);
  const bool by_row = sizes.rows > 0 && (begins != nullptr || ends != nullptr);
  std::vector<SeenBlock> blocks;
  for (std::int64_t row = 0; row < (by_row ? sizes.rows : 1); ++row) {
    const layout::Range rows = by_row ? layout::Range{row, row + 1} : layout::Range{0, sizes.rows};
    const auto of_row = [&](const std::int64_t* all) {
      return all == nullptr ? nullptr : all + row * sizes.queries;
    };
    for (std::int64_t begin = 0; begin < sizes.queries; begin += sizes.block) {
      const layout::Range queries{begin, std::min(sizes.queries, begin + sizes.block)};
      const std::int64_t own_end = sizes.first + begin + 1;
      layout::Range keys{own_end > seen.window ? own_end - seen.window : 0,
                         sizes.first + queries.end};
      if (seen.ends && ends == nullptr) keys.end = sizes.keys;
      if (by_row) keys = narrowed(keys, queries, of_row(begins), of_row(ends));
      keys.end = std::clamp<std::int64_t>(keys.end, 1, sizes.keys);
      keys.begin = std::clamp<std::int64_t>(keys.begin, 0, keys.end - 1);
      blocks.push_back({rows, queries, keys});
    }
  }
  return blocks;
}

at::Tensor hidden_keys(const SeenBlock& block, const SeenSizes& sizes, const SeenKeys& seen,
                       const at::Device& device) {
  const auto options = at::TensorOptions(at::kLong).device(device);
  const auto [rows, queries, keys] = block;
  const std::int64_t first = sizes.first + queries.begin;
  const at::Tensor key = at::arange(keys.begin, keys.end, options);
  const at::Tensor own = at::arange(first, first + queries.size(), options).view({1, 1, -1, 1, 1});
  const auto of_block = [&](const at::Tensor& all) {
    return all.narrow(0, rows.begin, rows.size())
        .narrow(1, queries.begin, queries.size())
        .reshape({rows.size(), 1, queries.size(), 1, 1});
  };
  at::Tensor hidden = seen.ends ? key >= of_block(*seen.ends) : key > own;
  if (seen.begins) hidden = hidden.bitwise_or(key < of_block(*seen.begins));
  if (seen.window != kNoWindow) hidden = hidden.bitwise_or(own - key >= seen.window);
  return hidden;
}

}  // namespace tessera::kernels
