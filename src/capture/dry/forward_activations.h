// Counts what forwards leave for their backwards, by unit and mode of recomputation, from three
// counted steps: what CompileOptions::activations takes. Next: counted_step.h, ../recompute_pass.h.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "capture/dry/counted_step.h"
#include "tessera/recompute_mode.h"

namespace tessera::capture {

/// The memory of a step outside its pool, in bytes of one rank.
struct StepMemory {
  std::int64_t idle = 0;  ///< held between steps
  std::int64_t peak = 0;
  std::vector<DryPass> passes = {};
};
/// `pool` is its size when its gradients were complete.
StepMemory outside_pool(std::int64_t between_steps, std::int64_t peak, std::int64_t pool,
                        std::vector<DryPass> passes);

/// One step for each mode of what may be recomputed.
struct StepsByMode {
  StepMemory none = {}, selective = {}, full = {};
};

struct CountedActivations {
  ForwardActivations forward = {};
  /// Counts gradients of activations, raw gradients and an update's memory: what comes on top of
  /// all that is kept.
  std::int64_t passing = 0;
};

/// Returns the activations of the last micro-batch; what units other than `units` leave counts as
/// outside of these, or after them. A unit that is called several times counts by its largest call.
/// Errors: kUsage where the steps call units differently.
CountedActivations counted_activations(const StepsByMode& steps,
                                       const std::set<std::string>& units);

/// Returns the units whose forwards hold no other unit's.
std::set<std::string> innermost_units(const std::vector<DryPass>& passes);

}  // namespace tessera::capture
