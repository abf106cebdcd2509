// A run whose steps follow plans is the run without them, bit for bit: every family, whatever is
// gathered, kept and reduced when.
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

void expect_same(const TrainingRun& found, const TrainingRun& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  for (const auto& [name, value] : expected.parameters.at(6)) {
    EXPECT_TRUE(at::equal(value, found.parameters.at(6).at(name))) << name;
  }
}

// Naive: a unit that is read before its gather, weights of the last step, half of a sum.
TEST_P(PlannedSteps, TrainAsWithoutPlans) {
  const auto& family = GetParam();
  const std::vector<Degrees> layouts =
      family.experts == Experts::kSome
          ? std::vector<Degrees>{{.shard = 2, .ep = 2}, {.tp = 2, .ep = 2}, {.shard = 2, .tp = 2}}
          : std::vector<Degrees>{{}, {.shard = 2}, {.replicate = 2, .shard = 2}, {.tp = 2}};
  unsigned seed = 0;
  for (const Degrees& degrees : layouts) {
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
      expect_same(run(train::CompileChoice::kPlan, form), expected);
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
      expect_same(run(train::CompileChoice::kPlan, 3), expected);
    }
  }
}

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
