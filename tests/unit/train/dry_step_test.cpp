// A dry step beside a run that is there: drawn families, layouts, dtypes and options of a step. Every
// rank issues the same collectives, group by group in the same order, of the same bytes.
#include "train/dry/dry_step.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "proof.h"
#include "support/test.h"
#include "train/trainer.h"
#include "unit/train/drawn_run.h"
#include "unit/train/inside_operations.h"

namespace tessera::train::dry_step_test {
namespace {

/// What a rank issues in a step, by kind and unit, in order.
using Issued = std::map<std::string, std::vector<std::string>>;

/// Sequence numbers count from the first step of a run. Norms, counts and agreements are relayed, and
/// a run has more of them.
void add(Issued& issued, comm::Entry entry) {
  if (std::ranges::any_of(entry.ops, &comm::OpFacts::relayed)) return;
  entry.sequence = 0;
  entry.label.controls.clear();  // the model's number in the process is among them
  issued[concat(to_string(entry.label.kind), " of ", entry.label.unit)].push_back(to_string(entry));
}

/// All ranks in the last step of a run of two.
std::vector<Issued> issued_in_run(const Config& config, int ranks) {
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

TEST(DryStep, IssuesWhatARunIssues) {
  const std::uint32_t draws = test::full_proof() ? 400 : 16;
  for (std::uint32_t seed = 1; seed <= draws; ++seed) {
    const Drawn d = drawn(seed);
    std::ostringstream words;
    words << "seed " << seed << ": " << d;
    SCOPED_TRACE(words.str());
    const TemporaryFolder folder;
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const ModelSource source = open_model(config.model, config.lora);
    const auto issued = issued_in_run(config, d.ranks());
    for (int rank = 0; rank < d.ranks(); ++rank) {
      Issued dry;
      for (const auto& one : dry_step(config, source, rank, d.ranks()).collectives) {
        add(dry, one.entry);
      }
      const Issued& real = issued[static_cast<std::size_t>(rank)];
      for (const auto& [what, batches] : real) EXPECT_EQ(dry[what], batches) << rank << ' ' << what;
      EXPECT_EQ(dry.size(), real.size()) << "rank " << rank;
    }
    if (::testing::Test::HasFailure()) return;
  }
}

/// The most that each rank held in the second step of a run, and what it held behind it. Left out is
/// what libtorch takes for itself in an operation, as oneDNN does for bf16 products.
struct HeldByRun {
  std::int64_t peak = 0;
  std::int64_t between = 0;
};
/// Over Gloo: ranks of one process hold what they sent until all of them have it.
std::vector<HeldByRun> held_by_run(const Config& config, int ranks) {
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
    hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase&) {
      held[static_cast<std::size_t>(world.rank())] = {peak, count.now()};
      if (metrics.step == 1) peak = 0;
    };
    run_training(config, world, hooks);
  };
  on_ranks(ranks, run, ThreadBackend::kGloo);
  return held;
}

TEST(DryStep, HoldsWhatARunHolds) {
  const std::uint32_t draws = test::full_proof() ? 400 : 12;
  for (std::uint32_t seed = 1; seed <= draws; ++seed) {
    const Drawn d = drawn(seed);
    std::ostringstream words;
    words << "seed " << seed << ": " << d;
    SCOPED_TRACE(words.str());
    const TemporaryFolder folder;
    Config config = config_of(folder, d);
    config.metrics.trace_steps.clear();
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const ModelSource source = open_model(config.model, config.lora);
    const auto held = held_by_run(config, d.ranks());
    // Control messages, which are text where ranks agree on a plan; models of size do not notice.
    constexpr std::int64_t kText = 16 << 10;
    // Routers choose freely.
    const double share = d.ep > 1 ? 0.06 : 0.03;
    for (int rank = 0; rank < d.ranks(); ++rank) {
      const DryStep dry = dry_step(config, source, rank, d.ranks());
      const HeldByRun& real = held[static_cast<std::size_t>(rank)];
      EXPECT_NEAR(static_cast<double>(dry.between_steps), static_cast<double>(real.between),
                  static_cast<double>(kText))
          << "rank " << rank;
      EXPECT_NEAR(static_cast<double>(dry.peak), static_cast<double>(real.peak),
                  share * static_cast<double>(real.peak) +
                      static_cast<double>(d.form > 0 ? kText * d.ranks() : kText))
          << "rank " << rank;
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Numbers of tokens and of experts are computed, in memory that is there.
TEST(DryStep, RefusesMoreTokensThanItCanCount) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  const ModelSource source = open_model(config.model, config.lora);
  config.training.local_batch_size = std::int64_t{1} << 22;
  EXPECT_REFUSED(kConfig, dry_step(config, source, 0, 2),
                 "found 4194304 rows of 16 tokens at once");
  config.training.local_batch_size = 1;
  config.training.global_batch_size = std::int64_t{1} << 23;
  EXPECT_REFUSED(kConfig, dry_step(config, source, 0, 2), "and 4194304 times as many in a step");
}

}  // namespace
}  // namespace tessera::train::dry_step_test
