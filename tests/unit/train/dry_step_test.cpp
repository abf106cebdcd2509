// Compares a dry step with a real run: drawn families, layouts, dtypes and options of a step. Every
// rank issues the same collectives, group by group in the same order, of the same bytes.
#include "train/dry/dry_step.h"

#include <atomic>
#include <sstream>

#include "base/test_hooks.h"
#include "comm/turns.h"
#include "proof.h"
#include "support/test.h"
#include "unit/train/counted_run.h"
#include "unit/train/drawn_run.h"

namespace tessera::train::dry_step_test {
namespace {

TEST(DryStep, IssuesWhatARunIssues) {
  for_drawn(
      test::full_proof() ? 400 : 16,
      [](const Drawn& d) {
        const DrawnRun run(d);
        const auto issued = issued_in_run(run.config, d.ranks());
        for (int rank = 0; rank < d.ranks(); ++rank) {
          expect_same(issued_in(dry_step(run.config, run.source, rank, d.ranks())),
                      issued[static_cast<std::size_t>(rank)], rank);
        }
      },
      SharedRows::kSome);
}

TEST(DryStep, HoldsWhatARunHolds) {
  for_drawn(
      test::full_proof() ? 400 : 12,
      [](const Drawn& d) {
        DrawnRun run(d);
        run.config.metrics.trace_steps.clear();
        const auto held = held_by_run(run.config, run.source, d.ranks());
        // Routers choose freely; below they do not.
        const Near near{.share = d.ep > 1 ? 0.06 : 0.03,
                        .text = d.form > 0 ? Near::kText * d.ranks() : Near::kText};
        for (int rank = 0; rank < d.ranks(); ++rank) {
          expect_near(dry_step(run.config, run.source, rank, d.ranks()),
                      held[static_cast<std::size_t>(rank)], near, rank);
        }
      },
      SharedRows::kSome);
}

// The two proofs above are of shared rows, too.
TEST(DryStep, SomeDrawnRunsShareRows) {
  int shared = 0;
  for (std::uint32_t seed = 1; seed <= 12; ++seed) {
    shared += over_cp(drawn(seed), seed).cp > 1 ? 1 : 0;
  }
  EXPECT_GE(shared, 2);
}

/// Experts over several ranks, the most of them that the layout has room for.
std::vector<Drawn> drawn_over_ep(std::size_t count) {
  std::vector<Drawn> found;
  for (std::uint32_t seed = 1; found.size() < count; ++seed) {
    Drawn d = drawn(seed);
    if (d.ep == 1) continue;
    if (d.shard * d.tp / d.etp % 4 == 0) d.ep = 4;
    found.push_back(d);
  }
  return found;
}

TEST(DryStep, WithTheLoadsOfARunHoldsWhatItHolds) {
  std::uint32_t seed = 0;
  for (const Drawn& d : drawn_over_ep(test::full_proof() ? 100 : 8)) {
    std::ostringstream words;
    words << "loads " << ++seed << ": " << d;
    SCOPED_TRACE(words.str());
    DrawnRun run(d);
    run.config.metrics.trace_steps.clear();
    const ExpertLoads loads = drawn_loads(seed, models::routed_experts(run.source.spec));
    const auto held = held_by_run(run.config, run.source, d.ranks(), loads);
    const Near near{.text = d.form > 0 ? Near::kText * d.ranks() : Near::kText};
    for (int rank = 0; rank < d.ranks(); ++rank) {
      const DryStep dry = dry_step(run.config, run.source, rank, d.ranks(), {.loads = loads});
      const HeldByRun& real = held[static_cast<std::size_t>(rank)];
      expect_near(dry, real, near, rank);
      EXPECT_EQ(dry.held.shards, real.parts.shards) << "rank " << rank;
      EXPECT_EQ(dry.held.pool, real.parts.pool) << "rank " << rank;
      EXPECT_EQ(dry.held.gradients, real.parts.gradients) << "rank " << rank;
    }
    if (::testing::Test::HasFailure()) return;
  }
}

/// Experts over several ranks under a schedule whose forwards overlap backwards.
std::vector<Drawn> drawn_pairs(std::size_t count) {
  std::vector<Drawn> found;
  for (Drawn d : drawn_over_ep(count)) {
    const std::size_t turn = found.size();
    d.pp = 1 + static_cast<int>(turn % 2);
    if (d.pp == 2) d.replicate = 1;
    d.form = 0;
    d.schedule = "Paired1F1B";
    d.micro_batches = 4;
    d.pipeline_reshard = turn % 4 < 2 ? PipelineReshard::kMicroBatch : PipelineReshard::kStep;
    found.push_back(d);
  }
  return found;
}

// Both passes have memory at once, and issue in the order of their turns.
TEST(DryStep, OfPairsIssuesAndHoldsWhatARunDoes) {
  std::uint32_t seed = 100;
  std::atomic<int> in_pairs = 0;
  const test_hooks::Set counts(test_hooks::exchange_delay, [&](const std::string&) {
    if (comm::Turns::under_way()) ++in_pairs;
    return std::chrono::microseconds(0);
  });
  for (const Drawn& d : drawn_pairs(test::full_proof() ? 60 : 4)) {
    std::ostringstream words;
    words << "pairs " << ++seed << ": " << d;
    SCOPED_TRACE(words.str());
    DrawnRun run(d);
    const auto issued = issued_in_run(run.config, d.ranks());
    const int of_run = in_pairs.exchange(0);
    EXPECT_GT(of_run, 0);
    run.config.metrics.trace_steps.clear();
    const ExpertLoads loads = drawn_loads(seed, models::routed_experts(run.source.spec));
    const auto held = held_by_run(run.config, run.source, d.ranks(), loads);
    EXPECT_EQ(in_pairs.exchange(0), of_run);
    int in_dry = 0;
    for (int rank = 0; rank < d.ranks(); ++rank) {
      const auto of_rank = static_cast<std::size_t>(rank);
      const auto dry = issued_in(dry_step(run.config, run.source, rank, d.ranks()));
      in_dry += in_pairs.exchange(0);
      expect_same(dry, issued[of_rank], rank);
      EXPECT_TRUE(dry.contains(kActivations));
      expect_near(dry_step(run.config, run.source, rank, d.ranks(), {.loads = loads}),
                  held[of_rank], {}, rank);
      in_pairs = 0;
    }
    EXPECT_EQ(in_dry, of_run);
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
