// Together: one thread runs the steps of one op on all ranks (ops/steps.h), over the memory that
// the ranks share. This is the transport of collectives between threads. In each round all ranks
// post, the messages are copied (or stay in place where they are only added), and all ranks
// combine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/group.h"

namespace tessera::comm {

/// Two ranks (indices) where one sends what the other does not expect.
struct ByteDifference {
  int from;
  int to;
  std::int64_t sent;
  std::int64_t expected;
};

/// Runs the op at `index` of every rank's batch. Returns the first difference in a round, and runs
/// neither that round nor later ones.
std::optional<ByteDifference> run_together(const std::vector<Batch>& batches, std::size_t index);
/// Returns the difference in the first round and runs nothing. For ops that are not relayed, on any
/// device.
std::optional<ByteDifference> difference_between(const std::vector<Batch>& batches,
                                                 std::size_t index);

}  // namespace tessera::comm
