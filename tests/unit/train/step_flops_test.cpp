// The operations that a rank computes in a step: the sums of a model by hand, compared with those
// of its layers, drawn.
#include <array>
#include <numeric>
#include <random>

#include "support/test.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/step_rates.h"
#include "unit/train/planned_run.h"
#include "unit/train/run_case.h"

namespace tessera::train::step_flops_test {
namespace {

// run_case's model, of a token and a forward: products, and attention to 8.5 of 16 positions.
constexpr double kUpProj = 2.0 * 192 * 128;
constexpr double kLayerProducts =
    2.0 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 2 * 128 + 2 * 32) + 3 * kUpProj;
constexpr double kAttention = 2.0 * 4 * (32 + 32) * 8.5;
constexpr double kHead = 2.0 * (260 * 128 + 128);
constexpr double kForward = 3 * (kLayerProducts + kAttention) + kHead;

StepFlops flops_of(const Config& config, int ranks) {
  const PlannedRun known = planned_run(config, ranks);
  const RunOfPlan run = known.of(config);
  return *step_flops(run, plan_of_steps(run, {}, {}));
}

TEST(StepFlops, AreThreeForwardsAndWhatIsRecomputed) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.training.local_batch_size = 2;
  config.training.global_batch_size = 2 * 2 * 3;  // on two ranks three micro-batches of two rows
  constexpr double kTokens = 3 * 2 * 16;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).all, kTokens * 3 * kForward);
  EXPECT_EQ(flops_of(config, 2).again, 0.0);
  config.activation_checkpoint.mode = RecomputeMode::kFull;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).again, kTokens * 3 * (kLayerProducts + kAttention));
  EXPECT_DOUBLE_EQ(flops_of(config, 2).all,
                   kTokens * (3 * kForward + 3 * (kLayerProducts + kAttention)));
  config.activation_checkpoint.mode = RecomputeMode::kSelective;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).again, kTokens * 3 * kAttention) << "products are kept";
  config.training.seq_len.reset();
  const PlannedRun known = planned_run(config, 2);
  const RunOfPlan run = known.of(config);
  EXPECT_FALSE(step_flops(run, plan_of_steps(run, {}, {})).has_value());
}

TEST(StepFlops, OfFrozenWeightsAreOneProductLess) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  constexpr double kTokens = 16;
  config.training.global_batch_size = 1;
  config.model.freeze = {"layers.1.mlp.up_proj"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all, kTokens * (3 * kForward - kUpProj));
  config.model.freeze = {"model.layers"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all, kTokens * (3 * kForward - 3 * kLayerProducts))
      << "the embedding in front of them is trained";
  config.model.freeze = {"embed_tokens", "layers.0"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all,
                   kTokens * (3 * kForward - 2 * (kLayerProducts + kAttention)))
      << "no backward comes to the first layer";
}

TEST(StepFlops, AreThoseOfTheLayersOverTheRanksThatShareThem) {
  constexpr std::array kFamilies{"qwen3", "llama", "gpt2", "gemma3-text", "qwen3-moe", "gpt-oss"};
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 draw(seed);
    const auto below = [&](std::uint32_t count) {
      return static_cast<std::int64_t>(draw() % count);
    };
    const std::string family = kFamilies.at(draw() % kFamilies.size());
    const std::int64_t micro_batches = 1 + below(3), rows = 1 + below(2),
                       positions = 8 + 8 * below(3);
    const int tp = below(2) == 0 ? 1 : 2, shard = below(2) == 0 ? 1 : 2;
    const bool full = below(2) == 0;
    SCOPED_TRACE(concat("seed ", seed, ": ", family, ", ", micro_batches, " x ", rows, " x ",
                        positions, ", tp ", tp, ", shard ", shard, full ? ", full" : ""));
    const TemporaryFolder folder;
    Config config = run_case(folder, Head::kOwn);
    write_model(folder, family + "-fp32");
    config.parallelism.tensor_parallel_degree = tp;
    config.training.seq_len = positions;
    config.training.local_batch_size = rows;
    config.training.global_batch_size = shard * rows * micro_batches;
    if (full) config.activation_checkpoint.mode = RecomputeMode::kFull;
    const PlannedRun known = planned_run(config, shard * tp);
    const auto costs = layer_costs(known.source.spec, known.source.description, positions);
    const double layers = std::accumulate(costs.layers.begin(), costs.layers.end(), 0.0);
    const double tokens = static_cast<double>(micro_batches * rows * positions) / tp;
    const double expected = tokens * (3 * (layers + costs.after) + (full ? layers : 0.0));
    EXPECT_NEAR(flops_of(config, shard * tp).all, expected, 1e-12 * expected);
  }
}

}  // namespace
}  // namespace tessera::train::step_flops_test
