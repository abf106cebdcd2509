// What a plan of a step takes, worked out without running it: gathered memory place by place, and
// time. Pure.
//
// A model of the runtime: one lane computes, one gathers. Gathers go out in the plan's order, each
// when the computing lane has passed its place and the one before it is over; a wait holds up the
// computing lane. So does a reduction, by what its rank was seen to wait for it: where a transfer
// is under way is not seen, and sums run on the rank's own thread. A unit around others computes
// its own part behind them in forward and before them in backward, as a root does its loss. What
// ranks on a few cores lose to each other's gathers is in the units' times as they were measured,
// so that a plan with fewer gathers than the measured one is better than its time. Next: passes.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "capture/plan_profile.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// The most that is gathered from a place of the step to the next one.
struct MemoryPoint {
  std::int64_t micro_batch = 0;
  bool is_forward = true;
  bool begins = true;  ///< the unit's forward or backward; else it ends
  fsdp::UnitId unit = 0;
  std::int64_t bytes = 0;
  bool operator==(const MemoryPoint&) const = default;
};

struct SimulatedStep {
  double step_ms = 0.0;
  double compute_ms = 0.0;
  double again_ms = 0.0;    ///< of these: forwards that are recomputed
  double waited_ms = 0.0;   ///< for gathers
  double reduced_ms = 0.0;  ///< waited for reductions
  double rest_ms = 0.0;     ///< of no unit: PlanProfile::rest_ms
  std::int64_t gathers = 0;
  std::int64_t reductions = 0;
  std::int64_t peak_bytes = 0;
  std::vector<MemoryPoint> curve;
};

/// Of more micro-batches the curve has the first ones and the last: those in between are alike.
inline constexpr std::int64_t kMostSimulated = 8;

/// The number of collectives of one unit in a step.
struct UnitCounts {
  std::int64_t gathers = 0;
  std::int64_t reductions = 0;
  bool operator==(const UnitCounts&) const = default;
};
/// Counts by unit, in a step of `micro_batches`; in a pipeline each stage has as many.
std::vector<UnitCounts> counts_of(const fsdp::StepPlan& plan, std::int64_t micro_batches);

/// Of a plan in which faults_of() finds nothing, of one stage, and a step of `micro_batches`.
/// Errors: kUsage for several stages, whose order is a pipeline's schedule.
SimulatedStep simulate(const fsdp::StepPlan& plan, const PlanProfile& profile,
                       std::int64_t micro_batches);

/// `profile`, measured in a step of `plan`, with its gathers as much longer or shorter as makes the
/// simulated step wait for them no longer than the measured one did: the shortest of each unit, which
/// the profile has, says nothing of cores and links that ranks share. As it is where no wait was
/// measured. Errors: as simulate().
PlanProfile as_waited(PlanProfile profile, const fsdp::StepPlan& plan, std::int64_t micro_batches);

/// The curve as `rows` lines of at most `columns` marks, micro-batches divided by '|', the least
/// and most bytes beside it.
std::string picture(const SimulatedStep& step, std::size_t columns = 64, std::size_t rows = 6);

}  // namespace tessera::capture
