#include "tessera/dry_run.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/text/printable.h"
#include "capture/dry/counted_step.h"
#include "capture/dry/forward_activations.h"
#include "comm/dry_world.h"
#include "dry/fake_operations.h"
#include "dry/memory_count.h"
#include "fsdp/handle.h"
#include "fsdp/held_bytes.h"
#include "tessera/compile.h"
#include "tessera/error.h"

namespace tessera {
namespace {

DryRunCollective noted(const comm::DryCollective& one) {
  const auto& entry = one.entry;
  DryRunCollective found{.group = one.group,
                         .ranks = one.ranks,
                         .kind = std::string(to_string(entry.label.kind)),
                         .unit = std::string(unit_label(entry.label.unit)),
                         .micro_batch = entry.label.micro_batch,
                         .sent_bytes = one.sent_bytes};
  for (const auto& op : entry.ops) {
    found.bytes += op.bytes;
    found.is_control = found.is_control || op.relayed;
  }
  return found;
}

struct Counted {
  DryRun run;
  std::vector<capture::DryPass> passes;
};

/// `mode` is that of all that plans may recompute, without plans; none: as the program has set it.
Counted count(const DryBuild& build, int rank, int ranks, KernelsOf kernels,
              std::optional<RecomputeMode> mode) {
  Counted found;
  DryRun& run = found.run;
  const auto world = comm::dry_world(
      rank, ranks,
      {.collective = [&](const auto& one) { run.collectives.push_back(noted(one)); },
       .message =
           [&](const auto& one) {
             run.messages.push_back({one.tag, one.sends, one.peer, one.bytes});
           }},
      kernels);
  const dry::FakeScope no_values(kernels);
  dry::MemoryCount memory;
  const DryModel built = build(*world);
  TESSERA_CHECK(built.model != nullptr && built.compute, ErrorKind::kUsage,
                "dry run: found a DryModel without ", built.model ? "`compute`" : "`model`",
                ", expected both");
  ShardedBase& model = *built.model;
  fsdp::set_regions(model, nullptr);
  if (mode) {
    compile(model, {});
    fsdp::set_planned_recompute(model, *mode);
  }
  const auto step = [&] {
    built.compute();
    const auto held = fsdp::held_bytes(model);
    run.shards = held.shards;
    run.gradients = held.gradients;
    run.pool = held.pool;
    if (built.update) {
      built.update();
    } else if (built.optimizer) {
      built.optimizer->step();
    }
    if (built.optimizer) {
      const auto state = fsdp::held_bytes(*built.optimizer);
      run.moments = state.moments;
      run.masters = state.masters;
    }
    model.zero_grad();
  };
  step();  // fills pools and optimizer, and records for a plan
  step();  // uses the pool of the step that recorded
  run.collectives.clear();
  run.messages.clear();
  auto counted = capture::counted_step(model, memory, step);
  run.unsharded = counted.unsharded;
  run.between_steps = counted.between_steps;
  run.peak = counted.peak;
  found.passes = std::move(counted.passes);
  return found;
}

capture::StepMemory outside_pool(const Counted& step) {
  return capture::outside_pool(step.run.between_steps, step.run.peak, step.run.pool, step.passes);
}

}  // namespace

DryRun dry_run(const DryBuild& build, int rank, int ranks, KernelsOf kernels) {
  return count(build, rank, ranks, kernels, std::nullopt).run;
}

DryActivations dry_activations(const DryBuild& build, int rank, int ranks, KernelsOf kernels) {
  const auto counted_in = [&](RecomputeMode mode) {
    return count(build, rank, ranks, kernels, mode);
  };
  const auto none = counted_in(RecomputeMode::kNone);
  const capture::StepsByMode steps{.none = outside_pool(none),
                                   .selective = outside_pool(counted_in(RecomputeMode::kSelective)),
                                   .full = outside_pool(counted_in(RecomputeMode::kFull))};
  std::set<std::string> units;
  for (const auto* step : {&steps.none, &steps.selective, &steps.full}) {
    units.merge(capture::innermost_units(step->passes));
  }
  auto found = counted_activations(steps, units);
  const std::int64_t reductions = std::max<std::int64_t>(0, none.run.pool - none.run.unsharded);
  return {.forward = std::move(found.forward),
          .others = steps.none.idle + reductions + found.passing};
}

}  // namespace tessera
