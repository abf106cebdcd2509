// Traces of chosen steps: RUN/metrics/trace/step-N.json, all ranks in one file on one clock.
//
// Next: base/trace.h for what a span is, io/chrome_trace.h for the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "tessera/world.h"

namespace tessera::train {

class StepTrace {
 public:
  /// `steps` is the same on every rank.
  StepTrace(std::vector<std::int64_t> steps, std::filesystem::path folder, World& world);

  /// Around each step, on the rank's own thread. Collective where the step is a chosen one. Errors:
  /// kComm; kIo on rank 0, which writes.
  void begin_step(std::int64_t step);
  void end_step(std::int64_t step);

 private:
  bool is_chosen(std::int64_t step) const;

  std::vector<std::int64_t> steps_;
  std::filesystem::path folder_;
  World& world_;
  std::shared_ptr<Trace> trace_;
  std::optional<TraceHere> here_;
  TraceClock::time_point origin_;  ///< what all ranks call zero
  TraceClock::time_point begin_;
};

}  // namespace tessera::train
