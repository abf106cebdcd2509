// [activation_checkpoint]: whole models in every mode, whose bits are those of mode "none".
#include <gtest/gtest.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"

namespace tessera::golden::recompute_test {
namespace {

constexpr RecomputeMode kModes[] = {RecomputeMode::kFull, RecomputeMode::kSelective};

class GoldenRecompute : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  train::Config config(const Layout& layout) const {
    auto result = config_for(layout);
    result.model.path = data_folder(GetParam());
    return result;
  }
  /// In every mode what mode "none" gives.
  void expect_no_bit_changes(train::Config config, const Layout& layout,
                             Routing routing = Routing::kOwn) const {
    const auto expected = run_gradients(config, layout, reference().batches(), routing);
    for (const auto mode : kModes) {
      SCOPED_TRACE(concat(to_string(layout), ", mode ", static_cast<int>(mode)));
      config.activation_checkpoint.mode = mode;
      expect_same_bits(run_gradients(config, layout, reference().batches(), routing), expected);
    }
  }
};

TEST_P(GoldenRecompute, GradientsHaveTheBitsOfModeNoneUnderEveryLayout) {
  const Layout layouts[] = {
      {.ranks = 1},
      {.ranks = 2, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
      {.ranks = 3, .micro_batches = MicroBatches::kOneRow},
      {.ranks = 4, .replicas = 2}};
  for (const auto& layout : layouts) expect_no_bit_changes(config(layout), layout);
}

TEST_P(GoldenRecompute, InBFloat16Too) {
  const Layout layout{.ranks = 2};
  auto with_defaults = config(layout);
  with_defaults.precision = {};  // bf16 compute
  expect_no_bit_changes(with_defaults, layout);
}

TEST_P(GoldenRecompute, TrainingHasTheBitsOfModeNone) {
  const Layout layout{.ranks = 2};
  auto settings = training_config(reference(), OptimizerKind::kAdamW, layout);
  settings.training.steps = 3;
  settings.training.max_norm = 1.0;
  const auto expected = run_training(settings, layout, {3});
  for (const auto mode : kModes) {
    settings.activation_checkpoint.mode = mode;
    const auto found = run_training(settings, layout, {3});
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
    expect_same_bits(found.parameters.at(3), expected.parameters.at(3));
  }
}

INSTANTIATE_TEST_SUITE_P(Dense, GoldenRecompute, ::testing::ValuesIn(kFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Gpt2, GoldenRecompute, ::testing::ValuesIn(kGpt2Folders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Gemma4, GoldenRecompute, ::testing::ValuesIn(kGemmaFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(DeepseekV2, GoldenRecompute, ::testing::ValuesIn(kDeepseekFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(SharedExperts, GoldenRecompute, ::testing::ValuesIn(kSharedExpertFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Moe, GoldenRecompute, ::testing::ValuesIn(kMoeFolders),
                         [](const auto& each) { return test_name(each.param); });

// The tower's layers get pixels, which need no gradient; experts get the routing of the file.
using GoldenRecomputeGemma4 = GoldenRecompute;

TEST_P(GoldenRecomputeGemma4, ATowerThatIsTrainedAndImposedRoutingChangeNoBit) {
  const Layout layout{.ranks = 2};
  auto trained = config(layout);
  trained.model.freeze = std::vector<std::string>{};
  expect_no_bit_changes(trained, layout, Routing::kImposed);
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenRecomputeGemma4, ::testing::ValuesIn(kGemmaFolders),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden::recompute_test
