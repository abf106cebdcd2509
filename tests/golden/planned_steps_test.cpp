// A run whose steps follow plans is the run without them, bit for bit: every family, whatever is
// gathered, kept and reduced when; and so is one whose regions are replayed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>

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

/// The least of any plan, as its refusal names it.
std::int64_t least_budget(train::Config config, const Layout& layout) {
  config.compile.memory_budget = train::MemoryBudget{.bytes = 1};
  try {
    run_training(config, layout, {});
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::string before = "expected at least ";
    const auto at = text.find(before);
    if (at != std::string::npos) return std::stoll(text.substr(at + before.size()));
    ADD_FAILURE() << text;
  }
  return 0;
}

std::vector<Degrees> layouts_of(const Family& family) {
  if (family.experts == Experts::kSome) {
    return {{.shard = 2, .ep = 2}, {.tp = 2, .ep = 2}, {.shard = 2, .tp = 2}};
  }
  return {{}, {.shard = 2}, {.replicate = 2, .shard = 2}, {.tp = 2}};
}

void expect_same(const TrainingRun& found, const TrainingRun& expected, std::int64_t step) {
  EXPECT_EQ(found.losses, expected.losses);
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  EXPECT_TRUE(std::ranges::equal(found.norms, expected.norms, same));
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
      expect_same(run(train::CompileChoice::kPlan, form), expected, 6);
    }
    // Where nobody has said how layers are recomputed, and memory is short, each is told by the plan.
    config.activation_checkpoint.mode.reset();
    config.training.seq_len = 24;
    config.compile.mode = train::CompileChoice::kPlan;
    config.compile.form = 3;
    const auto least = least_budget(config, layout_of(degrees));
    for (const std::int64_t more : {std::int64_t{0}, least / 4}) {
      SCOPED_TRACE(concat("budget ", least, " + ", more));
      config.compile.memory_budget = train::MemoryBudget{.bytes = least + more};
      expect_same(run(train::CompileChoice::kPlan, 3), expected, 6);
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

struct ReplayedRun : ::testing::Test {
  static train::Config config_of(const char* folder, const Layout& layout) {
    auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, layout);
    config.training.steps = 10;
    return config;
  }
  static constexpr Layout kLayout{.ranks = 2, .micro_batches = MicroBatches::kOneRow};
  static void expect_replayed(const train::Config& config) {
    const auto expected = run_training(config, kLayout, {10});
    auto replayed = config;
    replayed.compile.mode = train::CompileChoice::kReplay;
    const auto found = run_training(replayed, kLayout, {10});
    expect_same(found, expected, 10);
    EXPECT_GT(found.regions.replayed, 0);
  }
};

TEST_F(ReplayedRun, OfAdaptersIsTheSame) {
  auto config = config_of("qwen3-fp32", kLayout);
  config.lora.rank = 4;
  config.lora.alpha = 10.0;
  config.lora.targets = {"q_proj", "v_proj", "down_proj"};
  config.optimizer.lr = 0.05;
  expect_replayed(config);
}

// Steps are left out until the scale fits: gradients that are not finite go the same way.
TEST_F(ReplayedRun, UnderALossScaleIsTheSame) {
  auto config = config_of("qwen3-fp32", kLayout);
  config.precision = {};
  config.precision.param_dtype.dtype = DType::kFloat16;
  config.grad_scaler.init_scale = 0x1p30;
  config.grad_scaler.backoff_factor = 0x1p-8;
  expect_replayed(config);
}

TEST_F(ReplayedRun, GoesOnFromACheckpointAsIfItHadNotEnded) {
  auto config = config_of("qwen3-fp32", kLayout);
  const auto expected = run_training(config, kLayout, {10});
  config.compile.mode = train::CompileChoice::kReplay;
  config.checkpoint.folder = temporary_path("replayed");
  config.training.steps = 5;
  run_training(config, kLayout);
  config.training.steps = 10;
  const auto found = run_training(config, kLayout, {10});
  EXPECT_GT(found.regions.replayed, 0);
  ASSERT_EQ(found.losses.size(), 5U);
  EXPECT_TRUE(std::ranges::equal(found.losses, std::span(expected.losses).last(5)));
  for (const auto& [name, value] : expected.parameters.at(10)) {
    EXPECT_TRUE(at::equal(value, found.parameters.at(10).at(name))) << name;
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
                                           Family{"olmo2-mixed"}, Family{"gemma3-text-mixed"},
                                           Family{"gpt2-mixed"},
                                           Family{"mixtral-mixed", Experts::kSome},
                                           Family{"qwen3-moe-mixed", Experts::kSome},
                                           Family{"gpt-oss-mixed", Experts::kSome},
                                           Family{"deepseek-v2-mixed", Experts::kSome},
                                           Family{"gemma4-mixed", Experts::kSome}),
                         [](const auto& each) { return test_name(each.param.folder); });

}  // namespace
}  // namespace tessera::golden::planned_steps_test
