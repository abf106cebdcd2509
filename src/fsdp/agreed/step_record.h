// What one step of a sharded tree runs, as a value: each stage's forward and what its backward goes
// through. Recorded in the first step of a schedule, agreed on at the beginning of the others.
//
// Pure: no torch header. Next: order.h (traces), ../runtime/open_step.h (who records and follows).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/agreed/order.h"

namespace tessera::fsdp {

/// By position of a trace.
using Reach = std::vector<bool>;

/// One stage of a rank: the same for each of its micro-batches.
struct StageRecord {
  /// The outermost forwards of one micro-batch; checkpoints are counted from 1 over all of them.
  std::vector<Trace> parts;
  /// As `parts`: some backward needs the unit's parameters there, on some rank.
  std::vector<Reach> reached;
  bool operator==(const StageRecord&) const = default;
};

struct StepRecord {
  std::vector<StageRecord> stages;
  /// Micro-batches of one stage did not enter the same: there is nothing to follow.
  bool varies = false;
  bool operator==(const StepRecord&) const = default;
  /// Every stage has run, and all of its micro-batches alike.
  bool is_complete() const;
  std::uint64_t hash() const;
};

/// Counts checkpoints as if `before` had been the last one of what came earlier.
Trace counted_after(Trace trace, std::uint32_t before);

/// The units that the parts enter, those that lend them parameters before them, each at its first
/// place. `lenders`: by unit.
std::vector<UnitId> first_entries(const std::vector<Trace>& parts,
                                  const std::vector<std::vector<UnitId>>& lenders);

/// Adds what `reached` has to what is known of a backward through the same parts.
void add_reach(std::vector<Reach>& known, const std::vector<Reach>& reached);

}  // namespace tessera::fsdp
