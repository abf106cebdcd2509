#include "train/data/sampler.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::train {

RowOrder::RowOrder(std::uint64_t seed, std::int64_t rows_in_data, std::int64_t rows_in_step)
    : seed_(seed), rows_in_data_(rows_in_data), rows_in_step_(rows_in_step) {
  TESSERA_INVARIANT(rows_in_data >= 1 && rows_in_step >= 1, "no rows to order");
}

std::int64_t RowOrder::data_row(std::int64_t step, std::int64_t index) const {
  TESSERA_INVARIANT(step >= 1 && index >= 0 && index < rows_in_step_, "row outside its step");
  return row_at((step - 1) * rows_in_step_ + index);
}

std::int64_t RowOrder::row_at(std::int64_t position) const {
  const auto epoch = static_cast<std::uint64_t>(position / rows_in_data_);
  return Permutation(seed_, epoch, rows_in_data_)(position % rows_in_data_);
}

std::vector<RowRange> micro_batches(std::int64_t rows, std::int64_t local_rows, int data_ranks,
                                    int data_rank) {
  TESSERA_INVARIANT(local_rows >= 1, "micro-batches of no rows");
  const std::int64_t most_rows = layout::part_of(rows, data_ranks, 0).size();
  const std::int64_t count = std::max<std::int64_t>(1, (most_rows - 1) / local_rows + 1);
  const RowRange block = layout::part_of(rows, data_ranks, data_rank);
  std::vector<RowRange> result;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = std::min(block.begin + i * local_rows, block.end);
    result.push_back({begin, std::min(begin + local_rows, block.end)});
  }
  return result;
}

std::vector<RowRange> micro_batches_by_count(std::int64_t rows, int count, int data_ranks,
                                             int data_rank) {
  TESSERA_INVARIANT(count >= 1, "no micro-batches");
  const RowRange block = layout::part_of(rows, data_ranks, data_rank);
  std::vector<RowRange> result;
  for (int piece = 0; piece < count; ++piece) {
    const RowRange part = layout::part_of(block.size(), count, piece);
    result.push_back({block.begin + part.begin, block.begin + part.end});
  }
  return result;
}

}  // namespace tessera::train
