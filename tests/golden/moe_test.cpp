// Decoders with experts under sharding: bf16 with a batch's routing, imposed routing, the auxiliary
// loss, expert loads. Their gradients are in gradients_test.cpp, their training in
// training_test.cpp.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::golden {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

class GoldenMoe : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  train::Config config(const Layout& layout) const {
    auto result = config_for(layout);
    result.model.path = data_folder(GetParam());
    return result;
  }
};

TEST_P(GoldenMoe, BFloat16GradientsPointTheSameWayWithTheRecordedRouting) {
  for (const Layout& layout : {Layout{.ranks = 1}, Layout{.ranks = 3}}) {
    SCOPED_TRACE(to_string(layout));
    auto narrow = config(layout);
    narrow.precision = {};  // the defaults: bf16 compute, fp32 for storage, sums and wire
    const auto found = run_gradients(narrow, layout, reference().batches(), Routing::kImposed);
    EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), 0.02);
    ASSERT_EQ(found.by_name.size(), reference().gradients().size());
    for (const auto& [name, expected] : reference().gradients()) {
      EXPECT_LT(cosine_difference(found.by_name.at(name), expected), reference().bfloat16_bound())
          << name;
    }
  }
}

// The recorded routing is the model's own: imposing it changes no bit.
TEST_P(GoldenMoe, ImposedRoutingOfTheSameChoiceChangesNoBit) {
  for (const Layout& layout :
       {Layout{.ranks = 1, .micro_batches = MicroBatches::kOneRow}, Layout{.ranks = 3}}) {
    const auto own = run_gradients(config(layout), layout, reference().batches());
    expect_same_bits(
        run_gradients(config(layout), layout, reference().batches(), Routing::kImposed), own);
  }
}

// Property: whoever holds the rows, the routers are driven by the counts of the whole batch, each
// gradient once; the loss that is reported does not have it. 0.7 is no round number on purpose.
TEST_P(GoldenMoe, TheAuxiliaryLossIsThatOfTheWholeBatchUnderEveryLayout) {
  constexpr double kCoef = 0.7;
  for (const Layout& layout :
       {Layout{.ranks = 1}, Layout{.ranks = 2}, Layout{.ranks = 3},
        Layout{.ranks = 4, .replicas = 2}, Layout{.ranks = 2, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    auto with = config(layout);
    with.model.aux_loss_coef = kCoef;
    const auto found = run_gradients(with, layout, reference().batches());
    EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), kLossBound);
    std::size_t compared = 0;
    for (const auto& [name, plain] : reference().gradients()) {
      const bool router = name.find(".mlp.gate.") != std::string::npos ||
                          name.find(".mlp.router.") != std::string::npos;
      if (!router && name != "model.embed_tokens.weight") continue;
      const at::Tensor expected = plain + kCoef * reference().result("aux_grad/" + name);
      EXPECT_LT(relative_error(found.by_name.at(name), expected), kGradientBound) << name;
      ++compared;
    }
    EXPECT_GE(compared, 5U);
  }
}

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
  EXPECT_THAT(with.lines[0], HasSubstr("\"aux_loss\":"));
  EXPECT_THAT(plain.lines[0], ::testing::Not(HasSubstr("aux_loss")));
}

// Of step 1, whose weights are the file's: counts of the recorded choice, whoever holds the rows.
TEST_P(GoldenMoe, LoadsInTheMetricsAreThoseOfTheWholeBatch) {
  const auto first_line = [&](const Layout& layout) {
    auto settings = training_config(reference(), OptimizerKind::kSgd, layout);
    settings.training.steps = 1;
    return nlohmann::json::parse(run_training(settings, layout).lines.at(0));
  };
  const auto one = first_line({.ranks = 1});
  for (const Layout& layout : {Layout{.ranks = 1, .micro_batches = MicroBatches::kOneRow},
                               Layout{.ranks = 3}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    const auto line = first_line(layout);
    for (int layer = 0; layer < 4; ++layer) {
      const std::string key = "moe/load_max_over_mean/" + std::to_string(layer);
      const double load = line.at(key).get<double>();
      EXPECT_GE(load, 1.0) << key;
      EXPECT_LE(load, 8.0 / 3.0) << key << ": no expert is chosen twice by a token";
      EXPECT_EQ(load, one.at(key).get<double>()) << key;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenMoe, ::testing::ValuesIn(kMoeFolders),
                         [](const auto& each) { return test_name(each.param); });

TEST(GoldenMoeErrors, AnAuxiliaryLossOfADenseModelIsRefused) {
  auto config = config_for({.ranks = 1});
  config.model.path = data_folder("qwen3-fp32");
  config.model.aux_loss_coef = 0.1;
  EXPECT_THAT(
      error_of(ErrorKind::kConfig,
               [&] { run_gradients(config, {.ranks = 1}, Reference::of("qwen3-fp32").batches()); }),
      AllOf(HasSubstr("model.aux_loss_coef"), HasSubstr("expected 0")));
}

}  // namespace
}  // namespace tessera::golden
