#include "cli/step_time.h"

#include <iomanip>
#include <sstream>

#include "io/hf_folder.h"
#include "tessera/error.h"

namespace tessera::cli {

std::string time_line(std::string_view by, const capture::SimulatedStep& step) {
  std::ostringstream line;
  line << std::fixed << std::setprecision(2) << "  a step by " << by << ": " << step.step_ms
       << " ms, of which computing " << step.compute_ms << " (forwards again " << step.again_ms
       << "), waiting for gathers " << step.waited_ms << ", for reductions " << step.reduced_ms
       << ", the update and all else " << step.rest_ms << '\n';
  return line.str();
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
