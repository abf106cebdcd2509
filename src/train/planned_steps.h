// The plan that a run's steps follow: made after its first steps from what they took, or given.
//
// The first step records what the model enters, the second one follows a plan that is chosen by the
// bytes of units and fills pools and caches, three more are traced: what units and messages took on
// the slowest rank in the one of middle length is what passes choose by from then on. Steps in
// which some rank records or compares regions are not counted, up to the twentieth. Nothing is run
// again to be measured. Next: tessera/compile.h, capture/measured_profile.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/trace.h"
#include "capture/plan_profile.h"
#include "layout/parallel_dims.h"
#include "tessera/compile.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/dry/rank_memory.h"
#include "train/hf/model_source.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"

namespace tessera::train {

/// The least that any rank has of its host's memory, or of its device's. Collective.
/// Errors: kConfig where a device does not say its size.
MachineMemory least_memory(World& world);
/// The memory of the machine on which `ranks` are to run, this one or as `asked` describes it, for
/// a plan without a World. Errors: kConfig where the configuration takes a share of a CUDA device,
/// no device is here, and `asked` does not give its memory.
MachineMemory memory_here(const Config& config, int ranks, const AskedMemory& asked = {});
/// The kind of device that the run would compute on here.
KernelsOf computes_on(const Config& config);
/// Where the buckets of a run would lie that is to run here.
BucketsOn buckets_here(const Config& config);

/// [compile] of a run as the library takes it, where it holds for what the run is expected to
/// record. A share of memory is one of least_memory(). Collective.
/// Errors: kConfig, kFormat, kIo as plan_of_step.h and compile().
CompileOptions planned_options(const Config& config, const ModelSource& source,
                               const ParallelDims& dims, const ModelContract& contract,
                               std::int64_t micro_batches, World& world);

class PlannedSteps {
 public:
  /// `options.micro_batches` of each step. `folder`: rank 0 writes profile.json there, what was
  /// measured. Errors: as compile().
  PlannedSteps(CompileOptions options, const ShardedBase& model, World& world,
               std::filesystem::path folder);
  ~PlannedSteps();

  /// Enclose each step with its update, on the rank's thread. Collective where the step is a
  /// measured one. Errors: kComm; kIo on rank 0, which writes; as compile().
  void begin_step();
  void end_step(std::int64_t step);
  /// In place of end_step, where nothing was run.
  void leave_out_step();

 private:
  void measure(const std::vector<TraceSpan>& spans);
  void choose(std::int64_t step);

  CompileOptions options_;
  const ShardedBase& model_;
  World& world_;
  std::filesystem::path folder_;
  bool is_chosen_ = false;
  int steps_ = 0;       ///< so far of this process
  ReplayCalls before_;  ///< the step that is measured
  std::vector<capture::PlanProfile> measured_;
  std::shared_ptr<Trace> trace_;
  std::function<void()> through_;
  std::optional<TraceHere> here_;
  TraceClock::time_point begin_;
};

}  // namespace tessera::train
