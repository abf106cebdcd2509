// `tessera train` on devices: where the host waits, once a step.

#include "sim/reads.h"
#include "sim/sim.h"
#include "sim/training_places.h"
#include "support/test.h"

namespace tessera::sim::training_waits_test {
namespace {

using test::RanksOfRun;

/// Host waits of each step: of libtorch by name, and reads of the library.
struct Waits {
  std::map<std::string, std::int64_t> of_device;
  int reads = 0;
};

/// Returns the waits of the first rank's reads and of all ranks' devices. With several ranks
/// without the first step, since another one may still load its weights meanwhile.
std::vector<Waits> waits_of(const train::Config& config, const TemporaryFolder& folder,
                            const RanksOfRun& layout = {}) {
  std::vector<Waits> steps;
  train_in(kPlaces[0], layout, config, folder, [&](World& world) {
    if (world.rank() != 0) return train::TrainingHooks{};
    const auto reads = std::make_shared<Reads>();
    const auto before = std::make_shared<int>(0);
    train::TrainingHooks hooks;
    hooks.on_first_step = [=](std::int64_t /*done*/) {
      take_counts();
      *before = reads->count();
    };
    hooks.after_step = [=, &steps](const train::StepMetrics&, const ShardedBase&) {
      steps.push_back({take_counts().waits, reads->count() - *before});
      *before = reads->count();
    };
    return hooks;
  });
  if (layout.ranks > 1 && !steps.empty()) steps.erase(steps.begin());
  return steps;
}

void expect_one_read_a_step(const std::vector<Waits>& steps, std::size_t count) {
  EXPECT_EQ(steps.size(), count);
  for (const auto& step : steps) {
    EXPECT_THAT(step.of_device, IsEmpty());
    EXPECT_EQ(step.reads, 1);
  }
}

TEST(TrainingRun, TheHostWaitsOnceAStep) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t rows : {2, 12}) {
      auto config = test::small_run(folder);
      config.training.steps = 4;
      config.precision.param_dtype.dtype = dtype;
      config.training.local_batch_size = rows;
      expect_one_read_a_step(waits_of(config, folder), 4);
    }
  }
}

TEST(TrainingRun, TheHostWaitsOnceAStepOfEachKind) {
  const TemporaryFolder folder;
  for (const RunKind& kind : run_kinds()) {
    auto config = test::small_run(folder);
    config.training.steps = 3;
    kind.set(config, folder);
    config.validation.path.clear();  // it reads its own loss
    SCOPED_TRACE(kind.name);
    expect_one_read_a_step(waits_of(config, folder), 3);
  }
}

TEST(TrainingRun, TheHostWaitsOnceAStepForExpertsToo) {
  const TemporaryFolder folder;
  expect_one_read_a_step(waits_of(experts_run(folder), folder), 4);
}

TEST(TrainingRun, TheHostWaitsOnceAStepOfAPipelineToo) {
  const TemporaryFolder folder;
  auto config = test::small_run(folder);
  config.training.steps = 4;
  config.parallelism.pipeline_parallel_degree = 2;
  expect_one_read_a_step(waits_of(config, folder, {2, 1}), 3);
}

// How many rows come from the other rank only its routers know.
TEST(TrainingRun, TheHostWaitsOnceMoreALayerAndForwardForExpertsElsewhere) {
  const TemporaryFolder folder;
  for (const std::int64_t rows : {6, 3}) {
    auto config = experts_run(folder);
    config.parallelism.expert_parallel_degree = 2;
    config.training.local_batch_size = rows;
    const auto steps = waits_of(config, folder, {2, 1});
    EXPECT_EQ(steps.size(), 3U);
    for (const auto& step : steps) {
      EXPECT_THAT(step.of_device, IsEmpty());
      EXPECT_EQ(step.reads, 1 + 2 * (6 / rows)) << rows << " rows at a time";
    }
  }
}

}  // namespace
}  // namespace tessera::sim::training_waits_test
