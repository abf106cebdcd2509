// The pass `recompute`: whose forward is computed again in its backward, and how. Pure.
//
// What a layer keeps and what it takes to compute it again are bytes and time, as what stays
// gathered is: whatever saves most ms a byte gets the budget's bytes first. Choices begin with the
// mode of each layer that keeps least; an item is one step from there to more bytes and less time.
// Layers whose mode a user has set stay as they are. Next: passes.h, which goes through the items.
// Source: torchtitan issue 4636, where greedy was found as good as an integer program.
#pragma once

#include <cstdint>
#include <vector>

#include "capture/passes.h"
#include "tessera/recompute_mode.h"

namespace tessera::capture {

/// In the order of `units`, one for each. Errors: kConfig for a unit that is none of them, or is
/// there twice, for bytes below 0 and for less while it is computed again than it keeps.
ForwardActivations activations_of(const ForwardActivations& given,
                                  const std::vector<fsdp::PlanUnit>& units);

/// The most that activations take under these modes, by unit. `of` as activations_of() gives it.
/// `blocks`, by unit: those of replayed regions, of which what is idle lies beside; empty: none are.
std::int64_t most_activations(const ForwardActivations& of, const fsdp::StepRecord& record,
                              const std::vector<RecomputeMode>& modes,
                              const std::vector<UnitBlocks>& blocks = {});

/// By unit: a plan may choose its mode, and it keeps less in another than in none.
std::vector<bool> units_to_recompute(const PlanProblem& problem);

/// The mode in which it keeps least, of equals the one that takes least time.
RecomputeMode least_mode(const UnitActivations& unit);

/// From a mode to one that keeps more.
struct RecomputeItem {
  fsdp::UnitId unit = 0;
  RecomputeMode from = RecomputeMode::kFull;
  RecomputeMode to = RecomputeMode::kNone;
  double saves_ms = 0.0;  ///< a micro-batch
  std::int64_t bytes = 0;
  double per_byte() const { return saves_ms / static_cast<double>(bytes > 0 ? bytes : 1); }
};

/// Of all units_to_recompute(), most ms a byte first; of equals late units first, whose activations
/// last shortest. An item may be taken where its unit is in `from`.
std::vector<RecomputeItem> recompute_items(const PlanProblem& problem);

/// Why a unit has this mode, in words.
std::string recompute_reason(const PlanProblem& problem, fsdp::UnitId unit, RecomputeMode mode);

}  // namespace tessera::capture
