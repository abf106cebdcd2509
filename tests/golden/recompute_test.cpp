// [activation_checkpoint]: whole models in every mode, whose bits are those of mode "none". A
// pairwise part of folder x layout x mode in ./test, half of the layouts for a folder and the other
// half for the next, as for the modes in bf16 and for training; all of it under `scripts/full
// golden`.

#include <iterator>
#include <span>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::recompute_test {
namespace {

const std::vector<RecomputeMode> kModes{RecomputeMode::kFull, RecomputeMode::kSelective};

class GoldenRecompute : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  train::Config config(const Layout& layout) const {
    auto result = config_for(layout);
    result.model.path = data_folder(GetParam());
    return result;
  }
  std::vector<RecomputeMode> modes() const {
    return test::in_turn(kModes, 2, all_folders(), GetParam());
  }
  /// In these modes what mode "none" gives.
  void expect_no_bit_changes(train::Config config, const Layout& layout,
                             Routing routing = Routing::kOwn,
                             std::span<const RecomputeMode> modes = kModes) const {
    const auto expected = run_gradients(config, layout, reference().batches(), routing);
    for (const auto mode : modes) {
      SCOPED_TRACE(concat(to_string(layout), ", mode ", static_cast<int>(mode)));
      config.activation_checkpoint.mode = mode;
      expect_same_bits(run_gradients(config, layout, reference().batches(), routing), expected);
    }
  }
};

constexpr Layout kLayouts[] = {
    {.ranks = 1},
    {.ranks = 2, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
    {.ranks = 3, .micro_batches = MicroBatches::kOneRow},
    {.ranks = 4, .replicas = 2}};

using LayoutAndModes = std::pair<Layout, std::vector<RecomputeMode>>;

std::vector<LayoutAndModes> layouts_and_modes(const std::string& folder) {
  constexpr std::uint32_t kSeed = 2;
  const auto& folders = all_folders();
  std::vector<LayoutAndModes> all;
  for (const Layout& layout : kLayouts) all.push_back({layout, {}});
  for (const auto& choice : test::cases(
           {folders.size(), std::size(kLayouts), std::size(kModes)},
           [](const test::Choice&) { return true; }, kSeed)) {
    if (folders[choice[0]] == folder) all[choice[1]].second.push_back(kModes[choice[2]]);
  }
  return all;
}

TEST_P(GoldenRecompute, GradientsHaveTheBitsOfModeNoneUnderEveryLayout) {
  for (const auto& [layout, modes] :
       test::in_turn(layouts_and_modes(GetParam()), 2, all_folders(), GetParam())) {
    EXPECT_FALSE(modes.empty());
    expect_no_bit_changes(config(layout), layout, Routing::kOwn, modes);
  }
}

TEST_P(GoldenRecompute, InBFloat16Too) {
  const Layout layout{.ranks = 2};
  auto with_defaults = config(layout);
  with_defaults.precision = {};  // bf16 compute
  expect_no_bit_changes(with_defaults, layout, Routing::kOwn, modes());
}

TEST_P(GoldenRecompute, TrainingHasTheBitsOfModeNone) {
  const Layout layout{.ranks = 2};
  auto settings = training_config(reference(), OptimizerKind::kAdamW, layout);
  settings.training.steps = 3;
  settings.training.max_norm = 1.0;
  const auto expected = run_training(settings, layout, {3});
  for (const auto mode : modes()) {
    settings.activation_checkpoint.mode = mode;
    const auto found = run_training(settings, layout, {3});
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
    expect_same_bits(found.parameters.at(3), expected.parameters.at(3));
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenRecompute, ::testing::ValuesIn(all_folders()), folder_name);

// The tower's layers get pixels, which need no gradient; experts get the routing of the file.
using GoldenRecomputeGemma4 = GoldenRecompute;

TEST_P(GoldenRecomputeGemma4, ATowerThatIsTrainedAndImposedRoutingChangeNoBit) {
  const Layout layout{.ranks = 2};
  auto trained = config(layout);
  trained.model.freeze = std::vector<std::string>{};
  expect_no_bit_changes(trained, layout, Routing::kImposed);
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenRecomputeGemma4, ::testing::ValuesIn(kGemmaFolders),
                         folder_name);

}  // namespace
}  // namespace tessera::golden::recompute_test
