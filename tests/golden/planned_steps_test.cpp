// A run whose steps follow plans is the run without them, bit for bit: every family, whatever is
// gathered, kept and reduced when; and so is one whose regions are replayed.
#include <gtest/gtest.h>

#include <random>

#include "golden/degrees.h"
#include "golden/model_folder.h"

namespace tessera::golden::planned_steps_test {
namespace {

struct Family {
  const char* folder;
  Experts experts = Experts::kNone;
};
void PrintTo(const Family& family, std::ostream* out) { *out << family.folder; }

class PlannedSteps : public ::testing::TestWithParam<Family> {};

/// What a plan may depend on, drawn.
train::Config drawn_config(const Family& family, const Degrees& degrees, unsigned seed) {
  std::mt19937 random(seed);
  auto layout = layout_of(degrees);
  const bool one_row = random() % 2 == 0;
  layout.micro_batches = one_row ? MicroBatches::kOneRow : MicroBatches::kWhole;
  const Reference& reference = Reference::of(family.folder);
  auto config = training_config(reference, OptimizerKind::kAdamW, layout);
  const auto of_layout = config_for(family.folder, degrees);
  config.model = of_layout.model;
  config.parallelism = of_layout.parallelism;
  config.precision = of_layout.precision;
  config.parallelism.reshard_after_forward = random() % 4 != 0;
  config.training.sync_every_micro_batch = random() % 3 == 0;
  config.activation_checkpoint.mode = static_cast<RecomputeMode>(random() % 3);
  return config;
}

std::vector<Degrees> layouts_of(const Family& family) {
  if (family.experts == Experts::kSome) {
    return {{.shard = 2, .ep = 2}, {.tp = 2, .ep = 2}, {.shard = 2, .tp = 2}};
  }
  return {{}, {.shard = 2}, {.replicate = 2, .shard = 2}, {.tp = 2}};
}

void expect_same(const TrainingRun& found, const TrainingRun& expected, std::int64_t step) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  for (const auto& [name, value] : expected.parameters.at(step)) {
    EXPECT_TRUE(at::equal(value, found.parameters.at(step).at(name))) << name;
  }
}

// Naive: a unit that is read before its gather, weights of the last step, half of a sum.
TEST_P(PlannedSteps, TrainAsWithoutPlans) {
  const auto& family = GetParam();
  unsigned seed = 0;
  for (const Degrees& degrees : layouts_of(family)) {
    auto config = drawn_config(family, degrees, ++seed);
    SCOPED_TRACE(to_string(degrees));
    const auto run = [&](train::CompileChoice mode, int form) {
      config.compile.mode = mode;
      config.compile.form = form;
      return run_training(config, layout_of(degrees), {6});
    };
    const auto expected = run(train::CompileChoice::kOff, 3);
    for (const int form : {3, config.training.sync_every_micro_batch ? 2 : 1}) {
      SCOPED_TRACE(concat("form ", form));
      const auto found = run(train::CompileChoice::kPlan, form);
      expect_same(found, expected, 6);
    }
  }
}

// Naive: memory that the last replay wrote, a gradient that is added twice or not at all, a layer
// that reads what another one's scratch has become.
TEST_P(PlannedSteps, TrainAsWithoutReplays) {
  const auto& family = GetParam();
  unsigned seed = 10;
  for (const Degrees& degrees : layouts_of(family)) {
    auto config = drawn_config(family, degrees, ++seed);
    config.training.steps = 8;
    SCOPED_TRACE(to_string(degrees));
    const auto expected = run_training(config, layout_of(degrees), {8});
    config.compile.mode = train::CompileChoice::kReplay;
    const auto found = run_training(config, layout_of(degrees), {8});
    expect_same(found, expected, 8);
    std::string why;
    for (const auto& [reason, count] : found.regions.eager) why += concat(count, " ", reason, "; ");
    EXPECT_GT(found.regions.replayed, 0) << found.regions.recorded << " recorded, " << why;
  }
}

class ReplayedPipeline : public ::testing::TestWithParam<const char*> {};

// Several micro-batches of a region are alive, and a schedule may put its weight gradients off.
// Naive: an entry that the next micro-batch writes over, a product of what is gone.
TEST_P(ReplayedPipeline, TrainsAsWithoutReplays) {
  for (const char* folder : {"qwen3-fp32", "qwen3-moe-mixed"}) {
    SCOPED_TRACE(folder);
    const Layout layout{.ranks = 2, .micro_batches = MicroBatches::kOneRow};
    auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, layout);
    const auto of_folder = config_for(folder, {});
    config.model = of_folder.model;
    config.precision = of_folder.precision;
    config.parallelism.pipeline_parallel_degree = 2;
    config.pipeline.schedule = GetParam();
    config.training.steps = 8;
    const auto expected = run_training(config, layout, {8});
    config.compile.mode = train::CompileChoice::kReplay;
    const auto found = run_training(config, layout, {8});
    expect_same(found, expected, 8);
    std::string why;
    for (const auto& [reason, count] : found.regions.eager) why += concat(count, " ", reason, "; ");
    EXPECT_GT(found.regions.replayed, 0) << found.regions.recorded << " recorded, " << why;
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, ReplayedPipeline,
                         ::testing::Values("1F1B", "ZB1P", "Interleaved1F1B", "ZBV", "GPipe"),
                         [](const auto& each) { return std::string(each.param); });

INSTANTIATE_TEST_SUITE_P(Families, PlannedSteps,
                         ::testing::Values(Family{"qwen3-fp32"}, Family{"llama-mixed"},
                                           Family{"qwen2-mixed"}, Family{"mistral-fp32"},
                                           Family{"qwen3-moe-mixed", Experts::kSome},
                                           Family{"gpt-oss-mixed", Experts::kSome},
                                           Family{"deepseek-v2-mixed", Experts::kSome},
                                           Family{"gemma4-mixed", Experts::kSome}),
                         [](const auto& each) { return test_name(each.param.folder); });

}  // namespace
}  // namespace tessera::golden::planned_steps_test
