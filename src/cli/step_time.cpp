#include "cli/step_time.h"

#include <iomanip>
#include <sstream>

#include "tessera/error.h"

namespace tessera::cli {
namespace {

/// "3.20 ms", "2.99 s".
std::string time_text(double ms) {
  constexpr double kMostDigits = 1e6;
  const bool is_short = ms < 999.995;
  const double value = is_short ? ms : ms / 1e3;
  std::ostringstream text;
  if (value < kMostDigits) text << std::fixed;
  text << std::setprecision(2) << value << (is_short ? " ms" : " s");
  return text.str();
}

}  // namespace

std::string time_line(std::string_view by, const capture::SimulatedStep& step) {
  return concat("  a step by ", by, ": ", time_text(step.step_ms), ", of which computing ",
                time_text(step.compute_ms), " (of that ", time_text(step.again_ms),
                " recomputing), waiting for gathers ", time_text(step.waited_ms),
                ", for reductions ", time_text(step.reduced_ms), ", the update and all else ",
                time_text(step.rest_ms), "\n");
}

capture::SimulatedStep step_at(const check::Machine& machine, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic) {
  return capture::simulate(plan, train::profile_at(machine, run, traffic), traffic.micro_batches);
}

}  // namespace tessera::cli
