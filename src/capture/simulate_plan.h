// Simulates a plan of a step without running it: gathered memory place by place, and time. Pure.
//
// A model of the runtime: one lane computes, one gathers. Gathers are issued in the plan's order,
// each when the computing lane has passed its place and the one before it has ended; a wait stops
// the computing lane. So does a reduction, for as long as its rank was measured to wait for it: its
// transfer is not visible, and sums run on the rank's thread. A unit around others computes its own
// part after them in forward and before them in backward, as a root does its loss. What ranks on a
// few cores lose to each other's gathers is in the measured times of units, so that a plan with
// fewer gathers than the measured one is better than its simulated time. Next: passes.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "capture/plan_profile.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// The most that is gathered from one place of the step to the next.
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

/// With more micro-batches the curve has the first ones and the last: those in between are alike.
inline constexpr std::int64_t kMostSimulated = 8;

/// The number of collectives of one unit in a step.
struct UnitCounts {
  std::int64_t gathers = 0;
  std::int64_t reductions = 0;
  bool operator==(const UnitCounts&) const = default;
};
/// Counts by unit, in a step of `micro_batches`; each stage of a pipeline has as many.
std::vector<UnitCounts> counts_of(const fsdp::StepPlan& plan, std::int64_t micro_batches);

/// Simulates a step of `micro_batches`. `plan` has one stage, and faults_of() finds nothing in it.
/// Errors: kUsage for several stages, whose order is a pipeline's schedule.
SimulatedStep simulate(const fsdp::StepPlan& plan, const PlanProfile& profile,
                       std::int64_t micro_batches);

/// Returns `profile`, measured in a step of `plan`, with its gathers scaled so that the simulated
/// step waits for them no longer than the measured one did: the profile has the shortest gather of
/// each unit, which says nothing of cores and links that ranks share. Returns it unchanged where no
/// wait was measured. Errors: as simulate().
PlanProfile as_waited(PlanProfile profile, const fsdp::StepPlan& plan, std::int64_t micro_batches);

/// Draws the curve as `rows` lines of at most `columns` marks, micro-batches divided by '|', with
/// the least and most bytes at the side.
std::string picture(const SimulatedStep& step, std::size_t columns = 64, std::size_t rows = 6);

}  // namespace tessera::capture
