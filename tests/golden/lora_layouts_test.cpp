// Adapters beside layers that ranks share: their gradients are those of one rank, which peft has
// computed too (lora_test.py).
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::golden::lora_layouts_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

bool is_dense(const std::string& folder) {
  return folder.starts_with("llama") || folder.starts_with("olmo2") || folder.starts_with("gemma3");
}

/// Layers of every placement that the family has: cut by rows, by columns, copied, whole.
std::vector<std::string> targets_of(const std::string& folder) {
  if (is_dense(folder)) {
    return {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
  }
  if (folder.starts_with("deepseek")) {
    return {"q_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "o_proj",
            "layers.0.mlp.down_proj",
            "shared_experts.up_proj",
            "shared_experts.down_proj",
            "lm_head"};
  }
  if (folder.starts_with("gemma4")) {
    return {"language_model.layers.*.self_attn.*_proj", "language_model.layers.*.mlp.*_proj",
            "embedding_projection"};
  }
  return {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"};
}

/// Adapters whose second factors are no longer zero, for then the first ones' gradients would be:
/// three steps of one rank.
std::filesystem::path trained_adapters(const std::string& folder, double dropout = 0) {
  const Layout one{.ranks = 1};
  auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, one);
  config.lora.rank = 4;
  config.lora.alpha = 10.0;
  config.lora.targets = targets_of(folder);
  config.lora.dropout = dropout;
  // Of images nothing can be dropped.
  if (dropout > 0) std::erase(config.lora.targets, "embedding_projection");
  config.optimizer.lr = 0.05;
  config.training.steps = 3;
  config.checkpoint.folder = temporary_path("adapters");
  run_training(config, one);
  return config.checkpoint.folder / std::filesystem::path("step-3");
}

class LoraLayouts : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Degrees> layouts() const {
    std::vector<Degrees> all{{.tp = 2},
                             {.tp = 2, .sequence = false},
                             {.tp = 4},
                             {.tp = 4, .sequence = false},
                             {.shard = 2, .tp = 2},
                             {.replicate = 2, .tp = 2}};
    if (is_dense(GetParam())) return all;
    all.push_back({.shard = 2, .ep = 2});
    all.push_back({.tp = 2, .ep = 2});
    all.push_back({.tp = 2, .ep = 2, .sequence = false});
    all.push_back({.shard = 2, .tp = 2, .ep = 4});
    all.push_back({.tp = 2, .etp = 2});
    return all;
  }
};

TEST_P(LoraLayouts, GradientsOfAdaptersAreThoseOfOneRank) {
  const auto adapters = trained_adapters(GetParam());
  const auto run = [&](const Degrees& degrees) {
    auto config = config_for(GetParam(), degrees);
    config.model.path = adapters;
    return run_gradients(config, layout_of(degrees), Reference::of(GetParam()).batches());
  };
  const auto expected = run({});
  const double logits_bound = Reference::of(GetParam()).logits_bound();
  EXPECT_GT(
      (expected.logits - Reference::of(GetParam()).result("logits")).abs().max().item<double>(),
      100 * logits_bound)
      << "they learned";
  for (const auto& [name, gradient] : expected.by_name) {
    EXPECT_THAT(name, ::testing::ContainsRegex("lora_[AB]"));
    EXPECT_GT(gradient.norm().item<double>(), 1e-4) << name;
  }
  for (const Degrees& degrees : layouts()) {
    SCOPED_TRACE(to_string(degrees));
    const auto found = run(degrees);
    EXPECT_NEAR(found.loss, expected.loss, kLossBound);
    EXPECT_LT((found.logits - expected.logits).abs().max().item<double>(), logits_bound);
    ASSERT_EQ(found.by_name.size(), expected.by_name.size());
    for (const auto& [name, gradient] : expected.by_name) {
      ASSERT_TRUE(found.by_name.contains(name)) << name;
      EXPECT_LT(relative_error(found.by_name.at(name), gradient), kGradientBound) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LoraLayouts,
                         ::testing::Values("llama-fp32", "qwen3-moe-fp32", "gpt-oss-fp32",
                                           "deepseek-v2-fp32", "glm4-moe-fp32", "llama4-text-fp32",
                                           "gemma4-fp32", "mixtral-fp32", "olmo2-fp32",
                                           "gemma3-text-fp32"),
                         [](const auto& each) { return test_name(each.param); });

TEST(LoraLayoutRefusals, ExpertsAndRoutersHaveNoAdapters) {
  const Degrees degrees{.tp = 2, .ep = 2};
  for (const char* target : {"experts", "mlp.gate"}) {
    auto config = config_for("qwen3-moe-fp32", degrees);
    config.lora.rank = 4;
    config.lora.targets = {target};
    EXPECT_THAT(error_of(ErrorKind::kConfig,
                         [&] {
                           run_gradients(config, layout_of(degrees),
                                         Reference::of("qwen3-moe-fp32").batches());
                         }),
                AllOf(HasSubstr("lora.targets"), HasSubstr(target)));
  }
}

// Naive: every rank of tp drops by columns of its part. Gradients are those of step 1 of training.
TEST_P(LoraLayouts, DropoutIsThatOfOneRank) {
  const auto adapters = trained_adapters(GetParam(), 0.3);
  const auto run = [&](const Degrees& degrees) {
    auto config = config_for(GetParam(), degrees);
    config.model.path = adapters;
    return run_gradients(config, layout_of(degrees), Reference::of(GetParam()).batches());
  };
  const auto expected = run({});
  for (const Degrees& degrees : layouts()) {
    SCOPED_TRACE(to_string(degrees));
    const auto found = run(degrees);
    EXPECT_NEAR(found.loss, expected.loss, kLossBound);
    ASSERT_EQ(found.by_name.size(), expected.by_name.size());
    for (const auto& [name, gradient] : expected.by_name) {
      ASSERT_TRUE(found.by_name.contains(name)) << name;
      EXPECT_LT(relative_error(found.by_name.at(name), gradient), kGradientBound) << name;
    }
  }
}

// Of fp32 losses of one order of additions and another, after five steps. SGD: AdamW's first steps
// make a whole one out of noise.
TEST(LoraDropout, TrainingUnderTpIsThatOfOneRankAlsoRecomputedAndResumed) {
  const Degrees one;
  const Degrees two{.tp = 2};
  const Degrees whole_rows{.tp = 2, .sequence = false};
  const auto train = [](const Degrees& degrees, int steps, const std::string& folder,
                        RecomputeMode mode = RecomputeMode::kNone, std::int64_t seed = 7,
                        train::CompileChoice compile = train::CompileChoice::kOff) {
    const Layout layout = layout_of(degrees);
    auto config = training_config(Reference::of("llama-fp32"), OptimizerKind::kSgd, layout);
    config.parallelism = config_for("llama-fp32", degrees).parallelism;
    config.lora = {.rank = 4, .alpha = 10.0, .targets = targets_of("llama"), .dropout = 0.3};
    config.debug.seed = seed;
    config.optimizer.lr = 0.5;
    config.activation_checkpoint.mode = mode;
    config.training.steps = steps;
    config.checkpoint.folder = folder;
    config.compile.mode = compile;
    return run_training(config, layout).losses;
  };
  const auto expected = train(one, 6, "");
  const auto expect_near = [&](const std::vector<double>& found, const char* what) {
    SCOPED_TRACE(what);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], kStepLossBound);
    }
  };
  EXPECT_GT(std::abs(train(one, 6, "", RecomputeMode::kNone, 8).back() - expected.back()),
            20 * kStepLossBound)
      << "another seed drops others";
  const auto plain = train(two, 6, "");
  expect_near(plain, "sequence parallel");
  expect_near(train(whole_rows, 6, ""), "every rank has all positions");
  EXPECT_EQ(train(two, 6, "", RecomputeMode::kFull), plain);
  EXPECT_EQ(train(two, 6, "", RecomputeMode::kNone, 7, train::CompileChoice::kReplay), plain);
  const auto folder = temporary_path("resumed");
  auto parts = train(two, 2, folder);
  for (const auto& [degrees, steps] : {std::pair{one, 4}, std::pair{whole_rows, 6}}) {
    const auto more = train(degrees, steps, folder);
    parts.insert(parts.end(), more.begin(), more.end());
  }
  expect_near(parts, "resumed");
}

}  // namespace
}  // namespace tessera::golden::lora_layouts_test
