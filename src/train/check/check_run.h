// `tessera check`: whether a configuration's gradients are right, in which order its ranks issue
// what, and what a step takes, before a run starts: no weight, no device, no second process.
//
// Contracts, dtypes, order and memory are those of dry steps of the whole run (../dry/dry_step.h),
// of one rank of each place that ranks differ in; placements and numbers those of the model in
// small (../small/compare_runs.h). Rules are in ../../check. Next: ../../cli/check.cpp.
#pragma once

#include <optional>

#include "check/report.h"
#include "layout/parallel_dims.h"
#include "train/config/config.h"
#include "train/dry/dry_step.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// Everything but StepTime, which follows from the machine's rates.
struct CheckedRun {
  check::Report report;
  std::vector<DryStep> steps;  ///< of report.places
};

/// `memory`: bytes that a rank has, if known; `from` says who says so. By given `loads` a place is
/// that of its busiest rank. Errors: as train's, of configuration, contract and layout.
CheckedRun check_run(const Config& config, const ModelSource& source, int world,
                     std::optional<std::int64_t> memory = std::nullopt,
                     const std::string& from = {}, const ExpertLoads& loads = {});

}  // namespace tessera::train
