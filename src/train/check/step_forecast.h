// How long a step of a checked run takes on a machine, and the picture of its pipeline.
//
// Products of weights and attention alone are counted, so that the forecast is a lower bound. Of a
// pipeline the schedule is simulated with what stages compute and send over tp and ep; gathers and
// reductions stand before and behind it. Next: check_run.h, ../step_rates.h.
#pragma once

#include <string>

#include "check/machine.h"
#include "train/check/check_run.h"

namespace tessera::train {

/// Fills in time and schedule of checked.report. `machine` has the rates that `world` ranks need;
/// `by` names it. Needs training.seq_len. Leaves the report as it is where no dry step came to its
/// end.
void forecast_step(const Config& config, const ModelSource& source, int world,
                   const check::Machine& machine, const std::string& by, CheckedRun& checked);

}  // namespace tessera::train
