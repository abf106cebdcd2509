// The pass `recompute`: which forwards are computed again in their backwards, and how. Pure.
//
// Both what a layer keeps and what stays gathered are bytes that save time: the items that save
// most ms a byte get the budget's bytes first. Choices begin with the mode of each layer that keeps
// least; an item is one step from there to more bytes and less time. Layers whose mode a user has
// set stay as they are. Next: passes.h, which takes the items in order. Source: torchtitan issue
// 4636, where greedy was found as good as an integer program.
#pragma once

#include <cstdint>
#include <vector>

#include "capture/passes.h"
#include "tessera/recompute_mode.h"

namespace tessera::capture {

/// Returns the activations in the order of `units`, one for each. Errors: kConfig for a unit that
/// is none of them, or is there twice, for bytes below 0 and for less while it is computed again
/// than it keeps.
ForwardActivations activations_of(const ForwardActivations& given,
                                  const std::vector<fsdp::PlanUnit>& units);

/// Returns the most that activations take under these modes, by unit. `of` is a result of
/// activations_of(). `blocks`, by unit, are those of replayed regions, whose idle ones come on top;
/// empty: none are.
std::int64_t most_activations(const ForwardActivations& of, const fsdp::StepRecord& record,
                              const std::vector<RecomputeMode>& modes,
                              const std::vector<UnitBlocks>& blocks = {});

/// Returns by unit whether a plan may choose its mode and it keeps less in another mode than in
/// none.
std::vector<bool> units_to_recompute(const PlanProblem& problem);

/// Returns the mode in which it keeps least, of equals the one that takes least time.
RecomputeMode least_mode(const UnitActivations& unit);

/// A step from a mode to one that keeps more.
struct RecomputeItem {
  fsdp::UnitId unit = 0;
  RecomputeMode from = RecomputeMode::kFull;
  RecomputeMode to = RecomputeMode::kNone;
  double saves_ms = 0.0;  ///< a micro-batch
  std::int64_t bytes = 0;
  double per_byte() const { return saves_ms / static_cast<double>(bytes > 0 ? bytes : 1); }
};

/// Returns the items of all units_to_recompute(), most ms a byte first; of equals late units first,
/// whose activations are kept shortest. An item may be taken where its unit is in `from`.
std::vector<RecomputeItem> recompute_items(const PlanProblem& problem);

/// Says why a unit has this mode.
std::string recompute_reason(const PlanProblem& problem, fsdp::UnitId unit, RecomputeMode mode);

}  // namespace tessera::capture
