// compile(): the part that needs the model itself.
#include "tessera/compile.h"

#include <torch/version.h>

#include <memory>

#include "capture/planner.h"
#include "capture/replay/regions.h"
#include "fsdp/handle.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/shard.h"

namespace tessera {

void compile(const ShardedBase& model, const CompileOptions& options) {
  const auto set_regions = [&] {
    options.mode == CompileMode::kReplay ? capture::replay_regions(model)
                                         : fsdp::set_regions(model, nullptr);
  };
  if (options.mode == CompileMode::kOff) {
    set_regions();
    return fsdp::set_planner(model, {});
  }
  auto planning = std::make_shared<const capture::Planning>(capture::planning_of(options));
  if (planning->given) {
    capture::MadeFor run;
    run.model = concat(layout::hash(fsdp::plan_of(model)));
    run.world = model.mesh().shape().size();
    run.torch = TORCH_VERSION;
    run.micro_batches = options.micro_batches;
    // Only the program's runs cut rows: they have compared it (train/planned_steps.cpp).
    run.context = planning->given->made_for.context;
    require_made_for(*planning->given, run, planning->plan_from);
  }
  set_regions();  // last: an error of the options must change nothing
  const auto make = [planning](const auto& record, const auto& units, const auto& eager,
                               fsdp::PlanOrder order) {
    return capture::plan_step(*planning, record, units, eager, order);
  };
  fsdp::set_planner(model, make, planning->while_recording());
}

ReplayCalls ReplayCalls::operator-(const ReplayCalls& before) const {
  ReplayCalls since{replayed - before.replayed, recorded - before.recorded, {}};
  for (const auto& [why, calls] : eager) {
    const auto found = before.eager.find(why);
    const auto more = calls - (found == before.eager.end() ? 0 : found->second);
    if (more > 0) since.eager.emplace(why, more);
  }
  return since;
}

void capture::replay_regions(const ShardedBase& model) {
  if (fsdp::regions_of(model) != nullptr) return;
  fsdp::set_regions(model, std::make_shared<ReplayedRegions>());
}

namespace {

/// Returns none where no regions are replayed.
std::shared_ptr<capture::ReplayedRegions> replayed_regions(const ShardedBase& model) {
  return std::dynamic_pointer_cast<capture::ReplayedRegions>(fsdp::regions_of(model));
}

}  // namespace

capture::RegionBlocks capture::take_region_blocks(const ShardedBase& model) {
  const auto regions = replayed_regions(model);
  return regions == nullptr ? RegionBlocks{} : regions->blocks().take_most();
}

capture::RegionBytes capture::region_bytes(const ShardedBase& model) {
  const auto regions = replayed_regions(model);
  if (regions == nullptr) return {};
  return {.mapped = regions->blocks().bytes(),
          .decommitted = regions->blocks().decommitted_bytes()};
}

ReplayCalls replay_calls(const ShardedBase& model) {
  const auto regions = replayed_regions(model);
  return regions == nullptr ? ReplayCalls{} : regions->calls();
}

}  // namespace tessera
