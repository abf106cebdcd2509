// The profile accounts for the whole step, once.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::profile_of_run_test {
namespace {

using nlohmann::json;

json profile_of(const testing::TemporaryFolder& folder, const Config& config, int ranks) {
  on_ranks(ranks, [&](World& world) {
    TrainingHooks hooks;
    hooks.profiling = Profiling::kYes;
    run_training(config, world, hooks);
  });
  std::ifstream file(folder / "run/profile.json");
  return json::parse(file);
}

TEST(ProfileOfRun, SharesAreOfTheWholeStepAndNoneIsMissing) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.training.steps = 6;
  const json profile = profile_of(folder, config, 2);
  double sum = 0;
  for (const char* kind :
       {"products", "other kernels", "waiting for communication", "optimizer", "own code"}) {
    EXPECT_GT(profile[kind].get<double>(), 0.0) << kind;
    sum += profile[kind].get<double>();
  }
  EXPECT_NEAR(sum, 1.0, 1e-9);
  EXPECT_GT(profile["step_ms"].get<double>(), 0.0);
  EXPECT_TRUE(profile.contains("ms tessera::wait")) << profile.dump(1);
}

TEST(ProfileOfRun, SgdIsTheOptimizersToo) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.optimizer.name = OptimizerName::kSgd;
  config.optimizer.momentum = 0.9;
  config.training.steps = 1;  // the only step counts where there are no more
  const json profile = profile_of(folder, config, 1);
  EXPECT_GT(profile["optimizer"].get<double>(), 0.0);
  EXPECT_GE(profile["waiting for communication"].get<double>(), 0.0);
}

TEST(StepProfile, TableHasEveryKindInMillisecondsAndPerCent) {
  StepProfile profile;
  EXPECT_EQ(profile.to_table(), "profile: no step ran\n");
  profile.begin_step();
  const auto product = at::ones({64, 64}).mm(at::ones({64, 64}));
  profile.end_step();
  const std::string table = profile.to_table();
  for (const char* row : {"products ", "other kernels ", "waiting for communication ", "optimizer ",
                          "own code ", "a step ", "aten::mm "}) {
    EXPECT_THAT(table, ::testing::ContainsRegex(std::string("  ") + row +
                                                " *[0-9]+\\.[0-9][0-9] ms +[0-9]+\\.[0-9] %\n"));
  }
  EXPECT_THAT(table, ::testing::ContainsRegex("  a step .* 100\\.0 %\n"));
  const json shares = json::parse(profile.to_json());
  EXPECT_GT(shares["products"].get<double>(), 0.0);
  EXPECT_EQ(shares["optimizer"].get<double>(), 0.0);
}

// Experts on a device: one kernel, which calls no other product there.
TEST(StepProfile, GroupedProductsAreAmongProducts) {
  const at::Tensor rows = at::ones({64, 16}), matrices = at::ones({4, 16, 32});
  const at::Tensor ends = at::arange(16, 65, 16, at::kInt);
  StepProfile profile;
  profile.begin_step();
  at::_grouped_mm(rows, matrices, ends);
  profile.end_step();
  const json found = json::parse(profile.to_json());
  const double grouped = found.value("ms aten::_grouped_mm", 0.0);
  EXPECT_GT(grouped, 0.0) << found;
  EXPECT_GE(found["products"].get<double>() * found["step_ms"].get<double>() * (1 + 1e-9),
            grouped + found.value("ms aten::mm", 0.0))
      << found;
}

}  // namespace
}  // namespace tessera::train::profile_of_run_test
