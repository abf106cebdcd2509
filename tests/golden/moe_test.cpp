// Decoders with experts under sharding: what training reports of routers. Their gradients are in
// gradients_test.cpp, in bf16 in narrow_layouts_test.cpp, with an auxiliary loss in
// router_layouts_test.cpp, their training in training_test.cpp.

#include <array>
#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/temporary_folder.h"

namespace tessera::golden::moe_test {
namespace {

class GoldenMoe : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
};

TEST_P(GoldenMoe, TheAuxiliaryLossIsAddedWithoutChangingTheReportedLoss) {
  const Layout layout{.ranks = 2};
  auto settings = training_config(reference(), OptimizerKind::kSgd, layout);
  settings.training.steps = 2;
  const auto plain = run_training(settings, layout);
  settings.model.aux_loss_coef = 0.5;
  const auto with = run_training(settings, layout);
  EXPECT_EQ(with.losses[0], plain.losses[0]);
  EXPECT_NE(with.losses[1], plain.losses[1]) << "its gradient moved nothing";
  EXPECT_NE(with.norms[0], plain.norms[0]);
  EXPECT_THAT(with.lines[0], Says("\"aux_loss\":"));
  EXPECT_THAT(plain.lines[0], Not(Says("aux_loss")));
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenMoe, ::testing::ValuesIn(kMoeFolders), folder_name);

class GoldenMoeLoads : public GoldenMoe {
 protected:
  bool has_experts(int layer) const {
    const std::string stem = is_nemotron(reference().name()) ? "backbone" : "model";
    return std::ranges::any_of(
        std::array{"mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight",
                   "feed_forward.router.weight", "mixer.gate.weight"},
        [&](const char* router) {
          return reference().gradients().contains(concat(stem, ".layers.", layer, ".", router));
        });
  }
};

// Step 1 has the file's weights: counts of the recorded choice, for any distribution of rows.
TEST_P(GoldenMoeLoads, InTheMetricsAreThoseOfTheWholeBatch) {
  const auto first_line = [&](const Layout& layout) {
    auto settings = training_config(reference(), OptimizerKind::kSgd, layout);
    settings.training.steps = 1;
    return nlohmann::json::parse(run_training(settings, layout).lines.at(0));
  };
  const auto one = first_line({.ranks = 1});
  for (const Layout& layout :
       {Layout{.ranks = 1, .micro_batches = MicroBatches::kOneRow}, Layout{.ranks = 2},
        Layout{.ranks = 3}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    const auto line = first_line(layout);
    int found = 0;
    for (int layer = 0; layer < 4; ++layer) {
      const std::string key = "moe/load_max_over_mean/" + std::to_string(layer);
      ASSERT_EQ(line.contains(key), has_experts(layer)) << key;
      if (!has_experts(layer)) continue;
      ++found;
      const double load = line.at(key).get<double>();
      EXPECT_GE(load, 1.0) << key;
      const auto experts = reference().result(concat("router/", layer, "/logits")).size(1);
      const auto chosen = reference().result(concat("router/", layer, "/indices")).size(1);
      EXPECT_LE(load, static_cast<double>(experts) / static_cast<double>(chosen))
          << key << ": no expert is chosen twice by a token";
      EXPECT_EQ(load, one.at(key).get<double>()) << key;
    }
    EXPECT_GE(found, 1);
  }
}

std::vector<std::string> folders_with_loads() {
  std::vector<std::string> all(kMoeFolders);
  all.insert(all.end(), kDeepseekFolders.begin(), kDeepseekFolders.end());
  all.insert(all.end(), kSharedExpertFolders.begin(), kSharedExpertFolders.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenMoeLoads, ::testing::ValuesIn(folders_with_loads()),
                         folder_name);

TEST(GoldenMoeErrors, ScoresBeforeTheExpertsOfADenseModelAreRefused) {
  auto config = config_for({.ranks = 1});
  config.model.path = data_folder("qwen3-fp32");
  config.model.score_before_experts = true;
  EXPECT_REFUSED(kConfig,
                 run_gradients(config, {.ranks = 1}, Reference::of("qwen3-fp32").batches()),
                 "model.score_before_experts", "expected false");
}

TEST(GoldenMoeErrors, AnAuxiliaryLossOfADenseModelIsRefused) {
  auto config = config_for({.ranks = 1});
  config.model.path = data_folder("qwen3-fp32");
  config.model.aux_loss_coef = 0.1;
  EXPECT_REFUSED(kConfig,
                 run_gradients(config, {.ranks = 1}, Reference::of("qwen3-fp32").batches()),
                 "model.aux_loss_coef", "expected 0");
}

}  // namespace
}  // namespace tessera::golden::moe_test
