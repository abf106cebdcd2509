// A pipeline whose regions are replayed trains as the one whose are not, bit for bit: every kind of
// schedule with the other axes, dtypes, adapters, and ways to recompute. A pairwise part in ./test,
// all of it under `scripts/full compiled`.
//
// The class of bug: several micro-batches of a region are alive, their backwards come in another
// order than their forwards, and a schedule defers weight gradients: an entry that the next
// micro-batch overwrites, a product of freed memory.

#include <filesystem>
#include <iterator>

#include "golden/pipeline_case.h"
#include "golden/same_runs.h"
#include "proof.h"
#include "support/test.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden::replayed_pipeline_test {
namespace {

/// The trained parameters and their dtype.
enum class Trained : std::uint8_t { kFloat32, kBFloat16, kFloat16, kAdapters };
constexpr Trained kTrained[] = {Trained::kFloat32, Trained::kBFloat16, Trained::kFloat16,
                                Trained::kAdapters};

const std::vector<std::string> kReplayed{"qwen3-fp32", "qwen3-moe-mixed", "deepseek-v2-mixed"};
const std::vector<Degrees> kDegrees{{}, {.shard = 2}, {.shard = 2, .ep = 2}, {.tp = 2}};

struct Case {
  PipelineCase pipeline;
  Trained trained = Trained::kFloat32;
};

std::string to_string(const Case& c) {
  constexpr const char* kWords[] = {"", ", fp16", ", adapters"};
  const auto other = std::max(static_cast<int>(c.trained) - 1, 0);
  return to_string(c.pipeline) + kWords[other];
}

/// When memory is resharded does not depend on regions: it changes from case to case.
Case case_of(const test::Choice& choice) {
  const std::size_t turn = choice[0] + choice[1] + choice[2] + choice[3] + choice[4];
  Case c{.pipeline = {.folder = kReplayed[choice[0]],
                      .schedule = kKinds[choice[4]],
                      .degrees = kDegrees[choice[1]],
                      .recompute = kModes[choice[3]],
                      .reshard = kReshard[turn % std::size(kReshard)]},
         .trained = kTrained[choice[2]]};
  c.pipeline.bfloat16 = c.trained == Trained::kBFloat16;
  return c;
}

/// Each of ./test has the schedule that is next: with it a dimension there would be twice as many.
const std::vector<Case>& all_cases() {
  constexpr std::uint32_t kSeed = 8;
  const auto is_case = [](const test::Choice& choice) {
    return kDegrees[choice[1]].ep == 1 || experts_of(kReplayed[choice[0]]) == Experts::kSome;
  };
  static const auto all = [&] {
    const bool full = test::full_proof();
    auto choices = test::cases({kReplayed.size(), kDegrees.size(), std::size(kTrained),
                                std::size(kModes), full ? kKinds.size() : 1},
                               is_case, kSeed);
    std::vector<Case> cases;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (!full) choices[i].back() = i % kKinds.size();
      cases.push_back(case_of(choices[i]));
    }
    // All micro-batches' graphs are there when the first recording ends.
    if (!full) cases.push_back(case_of({0, 0, 0, 0, 0}));
    return cases;
  }();
  return all;
}

constexpr int kSteps = 6;

train::Config config_of(const Case& c) {
  const auto& of = c.pipeline;
  auto config = training_config(Reference::of(of.folder), OptimizerKind::kAdamW,
                                {.micro_batches = MicroBatches::kOneRow});
  train::set_parallelism(config, of.degrees);
  config.parallelism.pipeline_parallel_degree = of.stages;
  config.pipeline.schedule = of.schedule;
  config.pipeline.reshard = of.reshard;
  config.activation_checkpoint.mode = of.recompute;
  config.training.steps = kSteps;
  config.training.max_norm = 0.05;
  if (of.bfloat16) config.precision = {};
  if (c.trained == Trained::kFloat16) {
    config.precision = {};
    config.precision.param_dtype.dtype = DType::kFloat16;
    config.grad_scaler.init_scale = 0x1p30;  // steps are left out until it fits
    config.grad_scaler.backoff_factor = 0x1p-14;
  }
  if (c.trained == Trained::kAdapters) {
    config.lora.rank = 2;
    config.lora.alpha = 8.0;
    config.lora.targets = {"o_proj", "self_attn.q*_proj"};
    config.optimizer.lr = 0.05;
  }
  balance_experts(config, spec_of(of.folder), static_cast<unsigned>(of.recompute));
  return config;
}

void expect_replayed_alike(const Case& c) {
  auto config = config_of(c);
  const auto& degrees = c.pipeline.degrees;
  // DualPipeV takes twice as many micro-batches as stages.
  const int data = degrees.replicate * degrees.shard;
  const auto batch = batch_file(spec_of(c.pipeline.folder), 4 * data, 16);
  config.data.path = {batch};
  const Layout layout = with_stages(layout_of(degrees), c.pipeline.stages);
  const auto expected = run_training(config, layout, {kSteps});
  config.compile.mode = train::CompileChoice::kReplay;
  const auto found = run_training(config, layout, {kSteps});
  std::filesystem::remove(batch);
  expect_same(found, expected, kSteps);
  expect_replayed(found);
}

class ReplayedPipeline : public ::testing::TestWithParam<std::string> {};

TEST_P(ReplayedPipeline, TrainsAsWithoutReplays) {
  bool any = false;
  for (const Case& c : all_cases()) {
    if (c.pipeline.schedule != GetParam()) continue;
    any = true;
    SCOPED_TRACE(to_string(c));
    EXPECT_NO_THROW(expect_replayed_alike(c));
  }
  EXPECT_TRUE(any);
}

INSTANTIATE_TEST_SUITE_P(Schedules, ReplayedPipeline, ::testing::ValuesIn(kKinds),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace tessera::golden::replayed_pipeline_test
