// A forward beside a backward (pipeline.overlap) against the same schedule in turn: losses, norms and
// weights of clipped steps bit for bit.
//
// The class of bug: a pass that sees the other's grad mode, unit, gathered memory or random place; a
// collective that ranks issue in another order.
#include <atomic>
#include <string>

#include "base/test_hooks.h"
#include "comm/turns.h"
#include "golden/degrees.h"
#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "golden/pipeline_case.h"
#include "golden/reference.h"
#include "golden/same_runs.h"
#include "support/test.h"
#include "train/hf/model_source.h"

namespace tessera::golden::overlap_test {
namespace {

TEST(Overlap, Small) {
  constexpr int kSteps = 3;
  std::atomic<int> in_pairs = 0;
  const test_hooks::Set delay(test_hooks::exchange_delay, [&](const std::string&) {
    if (comm::Turns::under_way()) ++in_pairs;
    return std::chrono::microseconds(0);
  });
  const Degrees beside{.shard = 2, .ep = 2};
  auto config = training_config(Reference::of("qwen3-moe-fp32"), OptimizerKind::kAdamW,
                                {.micro_batches = MicroBatches::kOneRow});
  config.training.steps = kSteps;
  config.training.max_norm = 0.05;
  train::set_parallelism(config, beside);
  const std::string batch = batch_file(train::open_model(config.model).spec, 8, 24);
  config.data.path = {batch};
  const auto expected = run_training(config, layout_of(beside), {kSteps});
  EXPECT_EQ(in_pairs, 0);
  config.parallelism.pipeline_parallel_degree = 2;
  config.pipeline.schedule = "DualPipeV";
  const auto found = run_training(config, with_stages(layout_of(beside), 2), {kSteps});
  EXPECT_GT(in_pairs, 0);
  std::cerr << "in pairs " << in_pairs << "\n";
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  expect_same_bits(found.parameters.at(kSteps), expected.parameters.at(kSteps));
}

}  // namespace
}  // namespace tessera::golden::overlap_test
