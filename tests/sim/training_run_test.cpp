// `tessera train` on devices: the numbers of the CPU, and one wait of the host a step.
#include "dist/training_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/test_hooks.h"
#include "dist/checkpoint_tensors.h"
#include "dist/place.h"
#include "dist/ranks.h"
#include "sim/reads.h"
#include "sim/sim.h"
#include "tessera/error.h"

namespace tessera::sim::training_run_test {
namespace {

namespace fs = std::filesystem;
using test::Place;
using test::RanksOfRun;
using test::RunLosses;
using testing::TemporaryFolder;

/// Tests of this program begin on the CPU.
class In {
 public:
  explicit In(const Place& where) : before_(test::place()) { test::place() = where; }
  ~In() { test::place() = before_; }
  In(const In&) = delete;
  In& operator=(const In&) = delete;

 private:
  Place before_;
};

std::string shown(const Place& where, const RanksOfRun& layout) {
  return concat(layout.ranks, " rank(s), ", layout.replicas, " replica(s) on ", where.device,
                where.side ? ", side streams" : "");
}

RunLosses train_in(const Place& where, const RanksOfRun& layout, const train::Config& config,
                   const TemporaryFolder& folder, const test::HooksOf& hooks = {}) {
  static int runs = 0;
  const In here(where);
  return test::train_on(layout, config, folder / concat("run-", ++runs), hooks);
}

const Place kPlaces[] = {{"sim", false}, {"sim:0", true}};
const RanksOfRun kLayouts[] = {{1, 1}, {2, 1}, {4, 2}};

/// The CPU with the kernels that a device gets: the same numbers are the same bits then.
RunLosses train_with_kernels_of_devices(const RanksOfRun& layout, const train::Config& config,
                                        const TemporaryFolder& folder) {
  const test_hooks::Set as_there(test_hooks::kernels_of_devices, [] { return true; });
  return train_in({}, layout, config, folder);
}

// The order of sums is the layout's, whatever the streams do.
TEST(TrainingRun, HasTheBitsOfTheCpuWithItsKernels) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::small_run(folder);
    config.precision.param_dtype.dtype = dtype;
    config.training.local_batch_size = 3;
    for (const auto& layout : kLayouts) {
      const auto expected = train_with_kernels_of_devices(layout, config, folder);
      for (const auto& where : kPlaces) {
        SCOPED_TRACE(concat(to_string(dtype), ", ", shown(where, layout)));
        const auto found = train_in(where, layout, config, folder);
        EXPECT_EQ(found.losses, expected.losses);
        // Where a shard ends follows from the device's alignment: a norm adds other stretches.
        for (std::size_t i = 0; i < found.norms.size(); ++i) {
          EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-12 * expected.norms[i]);
        }
      }
    }
  }
}

// Other kernels: sums in other orders, rounded elsewhere.
TEST(TrainingRun, HasTheLossesOfTheCpu) {
  const TemporaryFolder folder;
  for (const auto& [dtype, tolerance] :
       {std::pair(DType::kFloat32, 1e-5), std::pair(DType::kBFloat16, 5e-3)}) {
    auto config = test::small_run(folder);
    config.precision.param_dtype.dtype = dtype;
    const auto expected = train_in({}, {}, config, folder);
    const auto found = train_in(kPlaces[0], {2, 1}, config, folder);
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    for (std::size_t i = 0; i < found.losses.size(); ++i) {
      EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * expected.losses[i]) << i;
      EXPECT_NEAR(found.norms[i], expected.norms[i], 10 * tolerance * expected.norms[i]) << i;
    }
  }
}

void expect_same_tensors(const fs::path& found, const fs::path& expected) {
  const auto a = test::all_tensors(found);
  const auto b = test::all_tensors(expected);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b) {
    EXPECT_TRUE(a.contains(name) && a.at(name) == values) << name;
  }
}

// Each checkpoint is copied while the next steps are on their way.
TEST(TrainingRun, GoesOnOnTheCpuFromACheckpointOfADeviceAndBackBitForBit) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::with_steps(test::small_run(folder), 6);
    config.precision.storage_dtype.dtype = dtype;
    config.precision.param_dtype.dtype = dtype;
    config.checkpoint.interval = 2;
    for (const RanksOfRun& layout : {RanksOfRun{1, 1}, RanksOfRun{4, 2}}) {
      for (const auto& where : kPlaces) {
        SCOPED_TRACE(concat(to_string(dtype), ", ", shown(where, layout)));
        const auto name = concat(to_string(dtype), layout.ranks, where.device, where.side);
        const auto run = [&](const char* of) { return folder / concat(name, of); };
        const auto on_cpu = [&](const char* of, std::int64_t steps) {
          const test_hooks::Set as_there(test_hooks::kernels_of_devices, [] { return true; });
          test::train_on(layout, test::with_steps(config, steps), run(of));
        };
        const auto on_device = [&](const char* of, std::int64_t steps) {
          const In here(where);
          test::train_on(layout, test::with_steps(config, steps), run(of));
        };
        on_device("undisturbed", 6);
        on_device("to the CPU", 2);
        on_cpu("to the CPU", 6);
        on_cpu("from the CPU", 4);
        on_device("from the CPU", 6);
        for (const char* of : {"to the CPU", "from the CPU"}) {
          for (const char* step : {"checkpoint/step-2", "checkpoint/step-4", "checkpoint/step-6"}) {
            SCOPED_TRACE(concat(of, ", ", step));
            expect_same_tensors(run(of) / step, run("undisturbed") / step);
          }
        }
      }
    }
  }
}

/// Host waits of each step: of libtorch by name, and reads of the library.
struct Waits {
  std::map<std::string, std::int64_t> of_device;
  int reads = 0;
};

std::vector<Waits> waits_of(const train::Config& config, const TemporaryFolder& folder) {
  std::vector<Waits> steps;
  train_in(kPlaces[0], {}, config, folder, [&](World&) {
    const auto reads = std::make_shared<Reads>();
    const auto before = std::make_shared<int>(0);
    train::TrainingHooks hooks;
    hooks.on_first_step = [=] {
      take_counts();
      *before = reads->count();
    };
    hooks.after_step = [=, &steps](const train::StepMetrics&, const ShardedBase&) {
      steps.push_back({take_counts().waits, reads->count() - *before});
      *before = reads->count();
    };
    return hooks;
  });
  return steps;
}

TEST(TrainingRun, TheHostWaitsOnceAStep) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t rows : {2, 12}) {
      auto config = test::small_run(folder);
      config.training.steps = 4;
      config.precision.param_dtype.dtype = dtype;
      config.training.local_batch_size = rows;
      for (const auto& step : waits_of(config, folder)) {
        EXPECT_THAT(step.of_device, ::testing::IsEmpty());
        EXPECT_EQ(step.reads, 1);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::sim::training_run_test
