// A dry step of a device's kernels compared with a run on simulated devices: drawn families,
// layouts, dtypes and options of a step. Ranks issue the same collectives, hold as many bytes
// between steps to the byte, and at most within 3 %.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "comm/device.h"
#include "comm/host_read.h"
#include "proof.h"
#include "sim/in_place.h"
#include "sim/sim.h"
#include "support/test.h"
#include "train/dry/dry_step.h"
#include "unit/train/counted_run.h"
#include "unit/train/drawn_run.h"

namespace tessera::sim::dry_device_test {
namespace {

using train::Drawn;
using train::DrawnRun;
using train::DryStep;

/// The second step of a run, by its ranks, each on a separate device.
struct OnDevice {
  std::vector<comm::DeviceMemory> memory;
  std::vector<fsdp::HeldBytes> parts;
  std::vector<train::Issued> issued;
};

OnDevice run_in(const test::Place& where, const train::Config& config,
                const train::ModelSource& source, int ranks, const train::ExpertLoads& loads) {
  const In here(where);
  const auto count = static_cast<std::size_t>(ranks);
  OnDevice found{std::vector<comm::DeviceMemory>(count), std::vector<fsdp::HeldBytes>(count),
                 std::vector<train::Issued>(count)};
  const test_hooks::Set seen(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    comm::Entry entry;
    comm::describe(batch, 0, entry);
    train::add(found.issued[static_cast<std::size_t>(rank)], entry);
  });
  train::on_ranks(ranks, loads, source, [&](World& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    // Memory that earlier runs in this process have left.
    const std::int64_t before = comm::memory_of(world.device()).held;
    train::TrainingHooks hooks;
    hooks.after_step = [&, rank, before](const train::StepMetrics& metrics,
                                         const ShardedBase& model) {
      found.memory[rank] = comm::memory_of(world.device());
      found.memory[rank].held -= before;
      found.memory[rank].peak -= before;
      found.parts[rank] = fsdp::held_bytes(model);
      if (metrics.step > 1) return;
      comm::begin_memory_peaks(world.device());
      found.issued[rank].clear();
    };
    train::run_training(config, world, hooks);
  });
  return found;
}

void expect_as_a_run(const Drawn& d, const std::function<void(train::Config&)>& set = {}) {
  DrawnRun run(d);
  run.config.metrics.trace_steps.clear();
  if (set) set(run.config);
  train::ExpertLoads loads;
  if (d.routed) loads = train::drawn_loads(1, models::routed_experts(run.source.spec));
  // Ranks of one process hold what they sent until all of them have it; those over NCCL do not, and
  // say nothing of what they issue.
  const auto issued = run_in({.device = "sim"}, run.config, run.source, d.ranks(), loads).issued;
  const OnDevice real =
      run_in({.device = "sim", .nccl = true}, run.config, run.source, d.ranks(), loads);
  run.config.device = train::DeviceName::kCuda;
  for (int rank = 0; rank < d.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const DryStep dry = dry_step(run.config, run.source, rank, d.ranks(), {.loads = loads});
    train::expect_same(train::issued_in(dry), issued[at], rank);
    EXPECT_EQ(dry.held.shards, real.parts[at].shards) << "rank " << rank;
    EXPECT_EQ(dry.held.pool, real.parts[at].pool) << "rank " << rank;
    EXPECT_EQ(dry.between_steps, real.memory[at].held) << "rank " << rank;
    EXPECT_NEAR(static_cast<double>(dry.peak), static_cast<double>(real.memory[at].peak),
                0.03 * static_cast<double>(real.memory[at].peak))
        << "rank " << rank;
  }
}

TEST(DryDevice, HoldsAndIssuesWhatARunDoes) {
  train::for_drawn(test::full_proof() ? 60 : 6, [](const Drawn& d) { expect_as_a_run(d); });
}

// For shards of 16 bits the other half of a master is held, too.
TEST(DryDevice, WithShardsOfSixteenBitsToo) {
  train::for_drawn(test::full_proof() ? 12 : 2, [](const Drawn& d) {
    expect_as_a_run(d, [](train::Config& config) {
      config.precision.storage_dtype.dtype = DType::kBFloat16;
      config.precision.param_dtype.dtype = DType::kBFloat16;
    });
  });
}

// A run counts steps while it is under way: afterwards its thread still waits for its own World.
TEST(DryDevice, LeavesTheThreadToItsWorld) {
  const DrawnRun run(train::drawn(1));
  train::Config config = run.config;
  config.device = train::DeviceName::kCuda;
  std::thread([&] {
    WorldOptions options;
    options.device = "sim";
    const auto world = World::of_one(options);
    const auto waits = comm::HostWaits::of_this_thread();
    ASSERT_NE(waits, nullptr);
    static_cast<void>(dry_step(config, run.source, 0, 8));
    EXPECT_EQ(comm::HostWaits::of_this_thread(), waits);
    EXPECT_TRUE(comm::backward_stays_here());
  }).join();
}

}  // namespace
}  // namespace tessera::sim::dry_device_test
