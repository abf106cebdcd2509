#include "cli/step_time.h"

#include <iomanip>
#include <sstream>

#include "io/hf_folder.h"
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

std::optional<train::Rates> rates_of(const PlannedMachine& machine, const train::Config& config) {
  if (!machine.flops) return std::nullopt;
  TESSERA_CHECK(
      config.training.seq_len, ErrorKind::kUsage,
      "--flops: found no training.seq_len, expected it: nothing else says how much a step "
      "computes; set it");
  const auto bandwidth = parse_byte_size(*machine.bandwidth, "--bandwidth");
  return train::Rates{.flops = *machine.flops, .bandwidth = static_cast<double>(bandwidth)};
}

capture::SimulatedStep step_at(const train::Rates& rates, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic) {
  return capture::simulate(plan, train::profile_at(rates, run, traffic), traffic.micro_batches);
}

}  // namespace tessera::cli
