// Counts what the ranks of a run issue and hold, to compare it with a dry step.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "support/test.h"
#include "train/dry/dry_step.h"
#include "train/trainer.h"
#include "unit/train/drawn_run.h"
#include "unit/train/inside_operations.h"

namespace tessera::train {

/// The calls of a rank in a step, by kind and unit, in order; all of activations under
/// kActivations, which its own thread issues, in any order relative to parameters.
using Issued = std::map<std::string, std::vector<std::string>>;
inline constexpr const char* kActivations = "activations";

/// Sequence numbers count from the first step of a run. Norms, counts and agreements are relayed,
/// and a run has more of them.
inline void add(Issued& issued, comm::Entry entry) {
  if (std::ranges::any_of(entry.ops, &comm::OpFacts::relayed)) return;
  entry.sequence = 0;
  entry.label.controls.clear();  // the model's number in the process is among them
  issued[concat(to_string(entry.label.kind), " of ", entry.label.unit)].push_back(to_string(entry));
  if (entry.label.activations != comm::ActivationPass::kNone) {
    issued[kActivations].push_back(to_string(entry));
  }
}

/// All ranks in the last step of a run of two.
inline std::vector<Issued> issued_in_run(const Config& config, int ranks) {
  std::mutex mutex;
  std::vector<Issued> issued(static_cast<std::size_t>(ranks));
  const test_hooks::Set seen(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    comm::Entry entry;
    comm::describe(batch, 0, entry);
    const std::lock_guard lock(mutex);
    add(issued[static_cast<std::size_t>(rank)], entry);
  });
  on_ranks(ranks, [&](World& world) {
    TrainingHooks hooks;
    hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase&) {
      if (metrics.step > 1) return;
      const std::lock_guard lock(mutex);
      issued[static_cast<std::size_t>(world.rank())].clear();
    };
    run_training(config, world, hooks);
  });
  return issued;
}

inline Issued issued_in(const DryStep& step) {
  Issued issued;
  for (const auto& one : step.collectives) add(issued, one.entry);
  return issued;
}

inline void expect_same(const Issued& dry, const Issued& real, int rank) {
  for (const auto& [what, batches] : real) {
    const auto found = dry.find(what);
    EXPECT_EQ(found == dry.end() ? std::vector<std::string>() : found->second, batches)
        << rank << ' ' << what;
  }
  EXPECT_EQ(dry.size(), real.size()) << "rank " << rank;
}

/// The most that each rank held in the second step of a run, and what it held behind it. Left out
/// is what libtorch takes for itself in an operation, as oneDNN does for bf16 products.
struct HeldByRun {
  std::int64_t peak = 0;
  std::int64_t between = 0;
  fsdp::HeldBytes parts = {};
};
/// Over Gloo: ranks of one process hold what they sent until all of them have it.
inline std::vector<HeldByRun> held_by_run(const Config& config, const ModelSource& source,
                                          int ranks, const ExpertLoads& loads = {}) {
  dry::install_allocator();
  std::vector<HeldByRun> held(static_cast<std::size_t>(ranks));
  const auto run = [&](World& world) {
    dry::MemoryCount count;
    InsideOperations inside;
    const kernels::WatchScope watch(inside);
    std::int64_t peak = 0;
    const auto look = [&] {
      if (!inside.is_inside()) peak = std::max(peak, count.now());
    };
    count.watch(look);
    inside.after = look;
    TrainingHooks hooks;
    hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase& model) {
      held[static_cast<std::size_t>(world.rank())] = {peak, count.now(), fsdp::held_bytes(model)};
      if (metrics.step == 1) peak = 0;
    };
    run_training(config, world, hooks);
  };
  on_ranks(ranks, loads, source, run, ThreadBackend::kGloo);
  return held;
}

/// `share`: by how much the peak may differ, in addition to control messages, which are text where
/// ranks agree on a plan; models of size do not notice those.
struct Near {
  double share = 0.03;
  std::int64_t text = kText;  ///< of the peak
  static constexpr std::int64_t kText = 16 << 10;
};
inline void expect_near(const DryStep& dry, const HeldByRun& real, const Near& near, int rank) {
  EXPECT_NEAR(static_cast<double>(dry.between_steps), static_cast<double>(real.between),
              static_cast<double>(Near::kText))
      << "rank " << rank;
  EXPECT_NEAR(static_cast<double>(dry.peak), static_cast<double>(real.peak),
              near.share * static_cast<double>(real.peak) + static_cast<double>(near.text))
      << "rank " << rank;
}

}  // namespace tessera::train
