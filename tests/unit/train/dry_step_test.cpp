// A dry step beside a run that is there: drawn families, layouts, dtypes and options of a step. Every
// rank issues the same collectives, group by group in the same order, of the same bytes.
#include "train/dry_step.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "proof.h"
#include "support/test.h"
#include "train/trainer.h"
#include "unit/train/drawn_run.h"

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

}  // namespace
}  // namespace tessera::train::dry_step_test
