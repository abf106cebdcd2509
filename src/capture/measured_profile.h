// Works out what units cost from the spans of a traced step: nothing is run again to be measured.
// Pure.
//
// A time is a unit's own: without the units inside it, and without what its rank waited for others
// meanwhile, which is what plans change. A gather lasts from when it was issued until its result
// was awaited, which is too long where it ended before it was needed. So of several gathers of one
// unit the shortest counts, of units of as many bytes the median, and simulate_plan.h scales all by
// how long they were waited for. Reductions are needed when a backward has ended, long after they
// were issued: what was waited for one is what it costs. The rest of the step is what neither units
// nor these waits took. Next: plan_profile.h.
#pragma once

#include <cstdint>
#include <vector>

#include "base/trace.h"
#include "capture/plan_profile.h"

namespace tessera::capture {

/// The profile of one rank, averaged over micro-batches. `units` names all that the step could run;
/// a unit that did not run costs nothing. `recomputed`, by unit, is how the step recomputed it,
/// none: not at all; such a backward has recompute_ms() of the unit's own forward in it, which is
/// subtracted.
PlanProfile measured_profile(const std::vector<TraceSpan>& spans,
                             const std::vector<fsdp::PlanUnit>& units, std::int64_t micro_batches,
                             const std::vector<RecomputeMode>& recomputed = {});

}  // namespace tessera::capture
