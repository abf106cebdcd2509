#include "kernels/cpu/row_blocks.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/parallel.h"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kRows = 64;

}  // namespace

RowBlocks::RowBlocks(std::int64_t rows, std::int64_t columns)
    : rows_(rows),
      sums_(at::zeros({std::max<std::int64_t>(1, (rows + kRows - 1) / kRows), columns},
                      at::kFloat)) {}

void RowBlocks::run(c10::function_ref<void(std::int64_t, std::int64_t, float*)> part) {
  const std::int64_t columns = sums_.size(1);
  auto* sums = static_cast<float*>(sums_.mutable_data_ptr());
  base::for_ranges(rows_, kRows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row += kRows) {
      part(row, std::min(end, row + kRows), sums + row / kRows * columns);
    }
  });
}

at::Tensor RowBlocks::total() const {
  const std::int64_t blocks = sums_.size(0);
  const std::int64_t columns = sums_.size(1);
  auto* sums = static_cast<float*>(sums_.mutable_data_ptr());
  for (std::int64_t block = 1; block < blocks; ++block) {
    const float* from = sums + block * columns;
    for (std::int64_t i = 0; i < columns; ++i) sums[i] += from[i];
  }
  // Not a view: a gradient that shares memory with other sums could not be taken over by anyone.
  return blocks == 1 ? sums_.select(0, 0) : sums_.select(0, 0).clone();
}

}  // namespace tessera::kernels::cpu
