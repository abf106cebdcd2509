// `tessera train` on devices: the numbers of the CPU, and one wait of the host a step.
#include "dist/training_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "dist/place.h"
#include "dist/ranks.h"
#include "sim/reads.h"
#include "sim/sim.h"
#include "tessera/error.h"

namespace tessera::sim::training_run_test {
namespace {

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

/// Other kernels: sums in other orders, rounded elsewhere.
void expect_near(const RunLosses& found, const RunLosses& expected, double tolerance) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * expected.losses[i])
        << "step " << i;
    EXPECT_NEAR(found.norms[i], expected.norms[i], 10 * tolerance * expected.norms[i])
        << "step " << i;
  }
}

TEST(TrainingRun, HasTheLossesOfTheCpu) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::small_run(folder);
    config.precision.param_dtype.dtype = dtype;
    config.training.local_batch_size = 3;
    const auto expected = train_in({}, {}, config, folder);
    for (const auto& layout : kLayouts) {
      for (const auto& where : kPlaces) {
        SCOPED_TRACE(concat(to_string(dtype), ", ", shown(where, layout)));
        const auto found = train_in(where, layout, config, folder);
        expect_near(found, expected, dtype == DType::kFloat32 ? 1e-5 : 5e-3);
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
        EXPECT_EQ(step.reads, 1);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::sim::training_run_test
