// Counts the operations of a step on a rank, and forecasts its time on a described machine, on
// which it was not run.
//
// Counts the products of weights and attention of the text, at two operations a multiplication. The
// gradient of an input is another product like the forward's, and so is that of a weight that is
// trained. All other work of a step is left out, so that the forecast is a lower bound of its time.
// A group whose ranks do not all lie on one host always sends at host_bandwidth.
// Next: dry/step_traffic.h, ../capture/simulate_plan.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "capture/plan_profile.h"
#include "check/machine.h"
#include "fsdp/agreed/step_plan.h"
#include "train/dry/step_traffic.h"
#include "train/plan_of_step.h"

namespace tessera::train {

struct StepFlops {
  double all = 0.0;
  double again = 0.0;  ///< part of `all`: recomputed forwards
};
/// Operations on a rank with most rows. None where training.seq_len is not known.
std::optional<StepFlops> step_flops(const RunOfPlan& run, const fsdp::StepPlan& plan);

/// The costs of units on `machine`, whose ranks lie one host after the other. rest_ms has the time
/// of all that is sent apart from gathers and reductions, as if none of it were hidden. Needs
/// training.seq_len, flops, and the bandwidths of the groups that send.
capture::PlanProfile profile_at(const check::Machine& machine, const RunOfPlan& run,
                                const StepTraffic& traffic);

/// Milliseconds of `messages` with `bytes` in all, among the ranks of `mesh` that differ on `axes`
/// alone, which lie on one host or not. Needs the bandwidth of these.
double ms_to_send(const check::Machine& machine, const MeshShapes& mesh, std::int64_t bytes,
                  std::int64_t messages, const std::vector<std::string_view>& axes);

/// The dtype in which most elements of a model compute.
DType most_computed(const ModelContract& contract);

/// "1.25 PFLOP", "310 GFLOP".
std::string flops_text(double flops);

}  // namespace tessera::train
