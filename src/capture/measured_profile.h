// What units cost, from the spans of a step that was traced: nothing is run again to be measured.
// Pure.
//
// Times are a unit's own: without the units inside it, and without what its rank stood waiting for
// others meanwhile, which is what plans are to change. A gather is as long as from when it went out
// until somebody had waited for it: where it was there before it was wanted, too long. So of several
// of one unit the shortest counts, of units of as many bytes the middle one, and simulate_plan.h
// makes all as much longer as they were waited for. Reductions are wanted when a backward has ended,
// long after they went out: what was waited for one is what it costs. The rest of the step is what
// neither units nor these waits took. Next: plan_profile.h.
#pragma once

#include <cstdint>
#include <vector>

#include "base/trace.h"
#include "capture/plan_profile.h"

namespace tessera::capture {

/// Of one rank, a micro-batch's mean. `units` names all that the step could run. What did not run
/// costs nothing. `recomputed`, by unit: how the step did it, none: not at all; such a backward has
/// recompute_ms() of the unit's own forward in it, which is taken off.
PlanProfile measured_profile(const std::vector<TraceSpan>& spans,
                             const std::vector<fsdp::PlanUnit>& units, std::int64_t micro_batches,
                             const std::vector<RecomputeMode>& recomputed = {});

}  // namespace tessera::capture
