// Which rows a step trains on, and which rank computes which of them in which micro-batch. Pure.
//
// Rows of a step depend on (seed, step, rows of a step) only, never on the number of ranks, so that
// runs under any layout see the same data. Who computes a row changes no sum, only its order.
// Next: data.h for what a row holds.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.h"
#include "layout/range.h"

namespace tessera::train {

/// Rows [begin, end) of the rows of one step.
using RowRange = layout::Range;

/// The order of a data set's rows: a permutation an epoch, one epoch after the other without a gap.
class RowOrder {
 public:
  /// Errors: kInternal unless rows_in_data and rows_in_step are at least 1.
  RowOrder(std::uint64_t seed, std::int64_t rows_in_data, std::int64_t rows_in_step);

  std::int64_t rows_in_step() const { return rows_in_step_; }
  /// The data row that is row `index` of step `step` (steps from 1).
  std::int64_t data_row(std::int64_t step, std::int64_t index) const;
  /// The data row that comes at `position`, counted from 0 through all epochs.
  std::int64_t row_at(std::int64_t position) const;

 private:
  std::uint64_t seed_;
  std::int64_t rows_in_data_;
  std::int64_t rows_in_step_;
};

/// The micro-batches of one data rank: its part of the rows (layout::part_of) in pieces of
/// `local_rows`, then empty ranges up to the largest number of any rank, so that all enter the same
/// collectives. At least one.
std::vector<RowRange> micro_batches(std::int64_t rows, std::int64_t local_rows, int data_ranks,
                                    int data_rank);

/// The same part in `count` pieces as equal as can be, some of them empty where it has fewer rows.
std::vector<RowRange> micro_batches_by_count(std::int64_t rows, int count, int data_ranks,
                                             int data_rank);

}  // namespace tessera::train
