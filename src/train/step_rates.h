// What a step computes on a rank, and how long it would take one that computes and sends at given
// rates: for machines on which nothing was measured.
//
// Counted are products of weights and attention, two operations a multiplication, of text. A gradient
// of an input is another product like its forward's, one of a weight, too, where that is trained. All
// else a step does counts for nothing, so that a time by rates is one that no step goes below. Next:
// step_traffic.h, ../capture/simulate_plan.h.
#pragma once

#include <optional>
#include <string>

#include "capture/plan_profile.h"
#include "fsdp/agreed/step_plan.h"
#include "train/plan_of_step.h"
#include "train/step_traffic.h"

namespace tessera::train {

/// Of one rank.
struct Rates {
  double flops = 0.0;      ///< operations a second
  double bandwidth = 0.0;  ///< bytes a second that it sends
};

struct StepFlops {
  double all = 0.0;
  double again = 0.0;  ///< of these: forwards that are recomputed
};
/// On a rank with most rows. None where training.seq_len is not known.
std::optional<StepFlops> step_flops(const RunOfPlan& run, const fsdp::StepPlan& plan);

/// What units cost at these rates. What is sent beside gathers and reductions is in rest_ms, as if none
/// of it were hidden. Needs training.seq_len.
capture::PlanProfile profile_at(const Rates& rates, const RunOfPlan& run,
                                const StepTraffic& traffic);

/// "1.25 PFLOP", "310 GFLOP".
std::string flops_text(double flops);

}  // namespace tessera::train
