// DeepSeek V2 under sharding: bf16 with a batch's routing, layers without experts among those that
// have them. Its gradients are in gradients_test.cpp, its training in training_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"

namespace tessera::golden {
namespace {

class GoldenDeepseekV2 : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  train::Config config(const Layout& layout) const {
    auto result = config_for(layout);
    result.model.path = data_folder(GetParam());
    return result;
  }
};

TEST_P(GoldenDeepseekV2, BFloat16GradientsPointTheSameWayWithTheRecordedRouting) {
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
TEST_P(GoldenDeepseekV2, ImposedRoutingOfTheSameChoiceChangesNoBit) {
  for (const Layout& layout :
       {Layout{.ranks = 1, .micro_batches = MicroBatches::kOneRow}, Layout{.ranks = 3}}) {
    const auto own = run_gradients(config(layout), layout, reference().batches());
    expect_same_bits(
        run_gradients(config(layout), layout, reference().batches(), Routing::kImposed), own);
  }
}

TEST_P(GoldenDeepseekV2, LoadsAreReportedOfTheLayersWithExperts) {
  const Layout layout{.ranks = 2};
  auto settings = training_config(reference(), OptimizerKind::kSgd, layout);
  settings.training.steps = 1;
  const auto line = nlohmann::json::parse(run_training(settings, layout).lines.at(0));
  EXPECT_FALSE(line.contains("moe/load_max_over_mean/0"));
  for (const char* layer : {"1", "2"}) {
    const double load = line.at(std::string("moe/load_max_over_mean/") + layer).get<double>();
    EXPECT_GE(load, 1.0) << layer;
    EXPECT_LE(load, 8.0 / 3.0) << layer << ": no expert is chosen twice by a token";
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenDeepseekV2, ::testing::ValuesIn(kDeepseekFolders),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden
