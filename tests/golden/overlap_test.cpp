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

void run(const char* folder, const char* kind, int pp, const Degrees& beside, bool bf16,
         RecomputeMode mode, bool micro) {
  SCOPED_TRACE(concat(folder, kind, pp, to_string(beside), bf16, static_cast<int>(mode), micro));
  constexpr int kSteps = 3;
  std::atomic<int> in_pairs = 0;
  const test_hooks::Set delay(test_hooks::exchange_delay, [&](const std::string&) {
    if (comm::Turns::under_way()) ++in_pairs;
    return std::chrono::microseconds(0);
  });
  auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW,
                                {.micro_batches = MicroBatches::kOneRow});
  config.training.steps = kSteps;
  config.training.max_norm = 0.05;
  if (bf16) config.precision = {};
  config.activation_checkpoint.mode = mode;
  train::set_parallelism(config, beside);
  const std::string batch = batch_file(train::open_model(config.model).spec, 8, 24);
  config.data.path = {batch};
  const auto expected = run_training(config, layout_of(beside), {kSteps});
  EXPECT_EQ(in_pairs, 0);
  config.parallelism.pipeline_parallel_degree = pp;
  config.pipeline.schedule = kind;
  if (!micro) config.pipeline.reshard = train::PipelineReshard::kStep;
  const auto found = run_training(config, with_stages(layout_of(beside), pp), {kSteps});
  EXPECT_GT(in_pairs, 0);
  std::cerr << "in pairs " << in_pairs << "\n";
  EXPECT_EQ(found.losses, expected.losses);
  for (std::size_t i = 0; i < found.norms.size(); ++i)
    EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-6);
  expect_same_bits(found.parameters.at(kSteps), expected.parameters.at(kSteps));
}

TEST(Overlap, Small) {
  for (const bool bf16 : {false, true})
    for (const auto mode : kModes)
      for (const bool micro : {false, true}) {
        run("qwen3-moe-fp32", "DualPipeV", 2, {.shard = 2, .ep = 2}, bf16, mode, micro);
        run("qwen3-moe-fp32", "Paired1F1B", 1, {.shard = 2, .ep = 2}, bf16, mode, micro);
        run("qwen3-moe-fp32", "Paired1F1B", 2, {.shard = 2, .ep = 2}, bf16, mode, micro);
      }
}

}  // namespace
}  // namespace tessera::golden::overlap_test
