// fp16 compute with a scaled loss: the gradients of fp32, and runs that find their scale.
#include <ATen/ATen.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/test.h"

namespace tessera::golden::float16_test {
namespace {

class GoldenFloat16 : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  train::Config in_float16(train::Config config) const {
    config.model.path = data_folder(GetParam());
    config.precision = {};
    config.precision.param_dtype.dtype = DType::kFloat16;
    return config;
  }
  train::Config training(const Layout& layout) const {
    return in_float16(training_config(reference(), OptimizerKind::kAdamW, layout));
  }
};

TEST_P(GoldenFloat16, GradientsPointTheSameWayOnEveryLayout) {
  const Layout layouts[] = {{.ranks = 1},
                            {.ranks = 1, .micro_batches = MicroBatches::kOneRow},
                            {.ranks = 2},
                            {.ranks = 4, .replicas = 2}};
  for (const auto wire : {DType::kFloat32, DType::kFloat16}) {
    for (const auto& layout : layouts) {
      SCOPED_TRACE(concat(to_string(layout), ", wire ", to_string(wire)));
      auto config = in_float16(config_for(layout));
      config.precision.reduce_dtype.dtype = wire;
      const auto found = run_gradients(config, layout, reference().batches());
      // Rounding errors are an eighth of bf16's, and 1 - cosine is quadratic in them.
      EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), 0.02 / 8);
      ASSERT_EQ(found.by_name.size(), reference().gradients().size());
      for (const auto& [name, expected] : reference().gradients()) {
        EXPECT_LT(cosine_difference(found.by_name.at(name), expected),
                  reference().bfloat16_bound() / 64)
            << name;
        const double norm = (found.by_name.at(name).norm() / expected.norm()).item<double>();
        EXPECT_NEAR(norm, 1.0, 0.01) << name << ": a scale is left in it";
      }
    }
  }
}

// Naive: the scale decides what comes out.
TEST_P(GoldenFloat16, AScaleThatIsTooLargeIsLoweredUntilTheGradientsAreFinite) {
  const Layout layout{.ranks = 2};
  auto config = in_float16(config_for(layout));
  config.grad_scaler.init_scale = 0x1p40;
  const auto found = run_gradients(config, layout, reference().batches());
  for (const auto& [name, expected] : reference().gradients()) {
    EXPECT_LT(cosine_difference(found.by_name.at(name), expected),
              reference().bfloat16_bound() / 64)
        << name;
  }
}

TEST_P(GoldenFloat16, LossesOfTrainingAreThoseOfTheReference) {
  for (const Layout& layout : {Layout{.ranks = 1}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    auto config = training(layout);
    config.grad_scaler.init_scale = 1024;  // no step is left out
    const auto found = run_training(config, layout);
    const auto expected = reference().step_losses(to_string(OptimizerKind::kAdamW));
    ASSERT_EQ(found.losses.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found.losses[i], expected[i], 0.02 / 8) << "step " << i + 1;
      const auto line = nlohmann::json::parse(found.lines[i]);
      EXPECT_EQ(line.at("loss_scale"), 1024.0);
      EXPECT_EQ(line.at("skipped_steps"), 0.0);
      EXPECT_EQ(line.at("grad_norm"), found.norms[i]);
    }
  }
}

// Naive: a step that was left out is not counted, moves something, or differs between layouts.
TEST_P(GoldenFloat16, StepsAreLeftOutUntilTheScaleFits) {
  std::vector<double> losses;
  for (const Layout& layout :
       {Layout{.ranks = 1}, Layout{.ranks = 2}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    auto config = training(layout);
    config.optimizer.lr = 1e-3;
    config.grad_scaler.init_scale = 0x1p30;
    config.grad_scaler.backoff_factor = 0x1p-8;
    const auto found = run_training(config, layout);
    ASSERT_EQ(found.lines.size(), 6U);
    int skipped = 0;
    double scale = 0x1p30;
    for (std::size_t i = 0; i < found.lines.size(); ++i) {
      const auto line = nlohmann::json::parse(found.lines[i]);
      EXPECT_EQ(line.at("step"), i + 1);
      EXPECT_EQ(line.at("loss_scale"), scale);
      if (line.at("grad_norm").is_null()) {
        ++skipped;
        scale /= 256;
        // The parameters stand: a batch of another step follows, and this one comes again in none.
        EXPECT_FALSE(std::isfinite(found.norms[i]));
      }
      EXPECT_EQ(line.at("skipped_steps"), skipped);
    }
    EXPECT_GE(skipped, 1);
    EXPECT_LE(skipped, 3);
    if (losses.empty()) losses = found.losses;
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(found.losses[i], losses[i], 0.005);
  }
}

INSTANTIATE_TEST_SUITE_P(Dense, GoldenFloat16, ::testing::Values("qwen3-fp32", "llama-mixed"),
                         folder_name);

}  // namespace
}  // namespace tessera::golden::float16_test
