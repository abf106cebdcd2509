// Adapters of layers that ranks share: their gradients are those of one rank, which peft has
// computed too (lora_test.py). In ./test --all a third of the layouts for each family, all of them
// under `scripts/full golden`.
#include <ATen/ATen.h>

#include <cmath>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "models/adapters.h"
#include "proof.h"
#include "support/temporary_folder.h"
#include "train/hf/hf_export.h"
#include "train/hf/model_source.h"
#include "train/hf/weights.h"

namespace tessera::golden::lora_layouts_test {
namespace {

bool is_llama4(const std::string& folder) { return folder.starts_with("llama4"); }

bool is_dense(const std::string& folder) {
  return (folder.starts_with("llama") && !is_llama4(folder)) || folder.starts_with("olmo2") ||
         folder.starts_with("gemma3") || folder.starts_with("granite") ||
         folder.starts_with("smollm3") || folder.starts_with("phi");
}

/// Linear layers of every placement that the family has: cut by rows, by columns, copied, whole.
std::vector<std::string> linears_of(const std::string& folder) {
  if (folder.starts_with("phi")) return {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"};
  if (is_dense(folder) || is_llama4(folder)) {
    return {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
  }
  if (folder.starts_with("deepseek")) {
    return {folder.starts_with("deepseek-v3") ? "q_?_proj" : "q_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "o_proj",
            "layers.0.mlp.down_proj",
            "shared_experts.up_proj",
            "shared_experts.down_proj",
            "lm_head"};
  }
  if (folder.starts_with("qwen3-next")) {
    return {"in_proj_qkvz",
            "in_proj_ba",
            "out_proj",
            "q_proj",
            "v_proj",
            "o_proj",
            "shared_expert.up_proj",
            "shared_expert.down_proj",
            "lm_head"};
  }
  if (is_nemotron(folder)) {
    return {"in_proj", "out_proj", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head"};
  }
  if (folder.starts_with("gemma4")) {
    return {"language_model.layers.*.self_attn.*_proj", "language_model.layers.*.mlp.*_proj",
            "embedding_projection"};
  }
  return {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"};
}

/// Images and the inputs of experts cannot be dropped.
std::vector<std::string> targets_of(const std::string& folder, double dropout) {
  std::vector<std::string> targets = linears_of(folder);
  if (dropout > 0) {
    std::erase(targets, "embedding_projection");
  } else if (!is_dense(folder)) {
    targets.emplace_back("experts.*");
  }
  return targets;
}

/// Adapters whose second factors are no longer zero, for then the first ones' gradients would be:
/// three steps of one rank.
std::filesystem::path trained_adapters(const std::string& folder, double dropout = 0) {
  const Layout one{.ranks = 1};
  auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, one);
  config.lora.rank = 4;
  config.lora.alpha = 10.0;
  config.lora.targets = targets_of(folder, dropout);
  config.lora.dropout = dropout;
  config.optimizer.lr = 0.05;
  config.training.steps = 3;
  config.checkpoint.folder = temporary_path("adapters");
  run_training(config, one);
  return config.checkpoint.folder / std::filesystem::path("step-3");
}

/// Dense ones first: three in a row share all of their layouts in turn.
const std::vector<std::string> kAdapted{
    "llama-fp32",       "olmo2-fp32",       "gemma3-text-fp32", "qwen3-moe-fp32",
    "gpt-oss-fp32",     "deepseek-v2-fp32", "deepseek-v3-fp32", "glm4-moe-fp32",
    "llama4-text-fp32", "gemma4-fp32",      "mixtral-fp32",     "granite-fp32",
    "smollm3-fp32",     "phi4-mini-fp32",   "qwen3-next-fp32",  "nemotron-h-fp32"};

void expect_near(const Gradients& found, const Gradients& expected) {
  EXPECT_NEAR(found.loss, expected.loss, kLossBound);
  ASSERT_EQ(found.by_name.size(), expected.by_name.size());
  for (const auto& [name, gradient] : expected.by_name) {
    ASSERT_TRUE(found.by_name.contains(name)) << name;
    EXPECT_LT(relative_error(found.by_name.at(name), gradient), kGradientBound) << name;
  }
}

class LoraLayouts : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Degrees> layouts() const {
    auto all = all_layouts();
    std::erase_if(all, [](const Degrees& each) {
      if (each.cp > 1 && has_state(spec_of(GetParam()))) return true;
      return heads_of(GetParam()) % each.tp != 0;
    });
    return test::in_turn(all, 3, kAdapted, GetParam());
  }
  Gradients gradients(const std::filesystem::path& adapters, const Degrees& degrees) const {
    auto config = config_for(GetParam(), degrees);
    config.model.path = adapters;
    return run_gradients(config, layout_of(degrees), Reference::of(GetParam()).batches());
  }

 private:
  std::vector<Degrees> all_layouts() const {
    std::vector<Degrees> all{{.tp = 2},
                             {.tp = 2, .sequence = false},
                             {.tp = 4},
                             {.tp = 4, .sequence = false},
                             {.shard = 2, .tp = 2},
                             {.replicate = 2, .tp = 2},
                             {.cp = 2},
                             {.cp = 4},
                             {.tp = 2, .cp = 2}};
    if (is_dense(GetParam())) return all;
    all.push_back({.shard = 2, .ep = 2});
    all.push_back({.tp = 2, .ep = 2});
    all.push_back({.tp = 2, .ep = 2, .sequence = false});
    all.push_back({.shard = 2, .tp = 2, .ep = 4});
    all.push_back({.tp = 2, .router = RouterTokens::kAll});
    all.push_back({.replicate = 2, .tp = 2, .ep = 2});
    all.push_back({.tp = 2, .etp = 2});
    all.push_back({.tp = 2, .etp = 2, .sequence = false});
    all.push_back({.shard = 2, .tp = 2, .ep = 2, .etp = 2});
    all.push_back({.ep = 2, .cp = 2});
    return all;
  }
};

TEST_P(LoraLayouts, GradientsOfAdaptersAreThoseOfOneRank) {
  const auto adapters = trained_adapters(GetParam());
  const auto expected = gradients(adapters, {});
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
    const auto found = gradients(adapters, degrees);
    EXPECT_LT((found.logits - expected.logits).abs().max().item<double>(), logits_bound);
    expect_near(found, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LoraLayouts, ::testing::ValuesIn(kAdapted), folder_name);

TEST(LoraLayoutRefusals, RoutersHaveNoAdaptersAndExpertsNoDropout) {
  const Degrees degrees{.tp = 2, .ep = 2};
  for (const auto& [target, key] :
       {std::pair{"experts", "lora.targets"}, std::pair{"mlp.gate", "lora.targets"},
        std::pair{"experts.down_proj", "lora.dropout"}}) {
    auto config = config_for("qwen3-moe-fp32", degrees);
    config.lora.rank = 4;
    config.lora.targets = {target};
    config.lora.dropout = 0.1;
    EXPECT_REFUSED(
        kConfig,
        run_gradients(config, layout_of(degrees), Reference::of("qwen3-moe-fp32").batches()), key,
        target);
  }
}

// Naive: every rank of tp drops by columns of its part. Gradients are those of step 1 of training.
TEST_P(LoraLayouts, DropoutIsThatOfOneRank) {
  const auto adapters = trained_adapters(GetParam(), 0.3);
  const auto expected = gradients(adapters, {});
  for (const Degrees& degrees : layouts()) {
    SCOPED_TRACE(to_string(degrees));
    expect_near(gradients(adapters, degrees), expected);
  }
}

// Compares fp32 losses of two orders of additions after five steps. SGD: AdamW's first steps make a
// whole one out of noise.
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
    config.lora = {.rank = 4, .alpha = 10.0, .targets = linears_of("llama"), .dropout = 0.3};
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

// ------------------------------------------------------------------------ experts

const std::vector<std::string> kWithExperts{"qwen3-moe-fp32", "gpt-oss-fp32", "llama4-text-fp32"};

class LoraOfExperts : public ::testing::TestWithParam<std::string> {
 protected:
  /// Adapters of the experts alone: nothing in front of the first ones has a gradient.
  train::Config config_of(const Degrees& degrees, int steps) const {
    auto config =
        training_config(Reference::of(GetParam()), OptimizerKind::kSgd, layout_of(degrees));
    config.parallelism = config_for(GetParam(), degrees).parallelism;
    config.lora = {.rank = 4, .alpha = 10.0, .targets = {"experts.*"}};
    config.optimizer.lr = 0.5;
    config.training.steps = steps;
    return config;
  }
};

// Each layout with its own way for tokens and factors; recomputed and replayed the bits are the
// same, and a run may resume in any of them.
TEST_P(LoraOfExperts, TrainUnderEveryLayoutAsOnOneRankAlsoRecomputedAndResumed) {
  const auto losses = [&](const train::Config& config, const Degrees& degrees) {
    return run_training(config, layout_of(degrees)).losses;
  };
  const auto expected = losses(config_of({}, 6), {});
  EXPECT_GT(expected.front() - expected.back(), 20 * kStepLossBound) << "they learned";
  const auto expect_near = [&](const std::vector<double>& found) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], kStepLossBound) << "step " << i + 1;
    }
  };
  const std::vector<Degrees> layouts{{.shard = 2, .ep = 2},
                                     {.replicate = 2, .shard = 2, .ep = 2},
                                     {.tp = 2, .ep = 2, .sequence = false},
                                     {.tp = 2, .etp = 2},
                                     {.shard = 2, .tp = 2, .ep = 2, .etp = 2}};
  for (const Degrees& degrees : test::in_turn(layouts, 2, kWithExperts, GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    const auto config = config_of(degrees, 6);
    const auto plain = losses(config, degrees);
    expect_near(plain);
    for (const auto mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
      auto recomputed = config;
      recomputed.activation_checkpoint.mode = mode;
      EXPECT_EQ(losses(recomputed, degrees), plain);
    }
    auto replayed = config;
    replayed.compile.mode = train::CompileChoice::kReplay;
    EXPECT_EQ(losses(replayed, degrees), plain);
  }
  const std::string folder = temporary_path("resumed");
  std::vector<double> parts;
  int steps = 0;
  for (const Degrees& degrees : {layouts[0], layouts[3], Degrees{}}) {
    auto config = config_of(degrees, steps += 2);
    config.checkpoint.folder = folder;
    const auto more = losses(config, degrees);
    parts.insert(parts.end(), more.begin(), more.end());
  }
  SCOPED_TRACE("resumed");
  expect_near(parts);
}

// Naive: each micro-batch's gradient takes the place of the one before, or the experts of a rank
// whose rows none chose have none.
TEST_P(LoraOfExperts, MicroBatchesAddUpToTheirRowsTogether) {
  const auto adapters = trained_adapters(GetParam());
  const auto run = [&](const Degrees& degrees, std::int64_t rows, bool sync_each) {
    auto config = config_for(GetParam(), degrees);
    config.model.path = adapters;
    config.training.local_batch_size = rows;
    config.training.sync_every_micro_batch = sync_each;
    return run_gradients(config, layout_of(degrees), Reference::of(GetParam()).batches());
  };
  const auto expected = run({}, 2, false);
  for (const bool sync_each : {false, true}) {
    expect_near(run({.tp = 2, .ep = 2}, 1, sync_each), expected);
  }
}

at::Tensor whole(const TensorSource& folder, const std::string& name) {
  const auto& info = *folder.find(name);
  return train::read_elements(folder, name, 0, info.numel()).view(info.shape).to(at::kDouble);
}

/// Returns what is added to a tensor of the files, of experts 0 to E - 1 (of one, where it says its
/// number).
at::Tensor added(const train::ModelSource& source, const std::string& name) {
  const std::string stem = name.substr(0, name.find(".experts.") + 9);
  const bool is_down = name.find("down_proj") != std::string::npos;
  const std::string layer = stem + (is_down ? "down_proj" : "gate_up_proj");
  const at::Tensor b = whole(*source.adapters, models::adapter_b(layer));
  const at::Tensor delta =
      at::bmm(b, whole(*source.adapters, models::adapter_a(layer))) * (10.0 / 4.0);
  if (source.spec.moe->layout == models::ExpertLayout::kInOut) return delta.transpose(1, 2);
  if (source.spec.moe->layout == models::ExpertLayout::kOutInAsOne) return delta;
  const at::Tensor own = delta[std::stoll(name.substr(stem.size()))];
  if (is_down) return own;
  return own.chunk(2, 0)[name.find("up_proj") == std::string::npos ? 0 : 1];
}

// Parts that end inside an expert, and inside a row.
TEST(LoraOfExpertsMerged, ElementsInAnyPartsAreThoseOfTheWholeSum) {
  for (const char* folder : {"qwen3-moe-fp32", "gpt-oss-fp32", "gemma4-fp32"}) {
    train::ModelConfig model;
    model.path = trained_adapters(folder).string();
    const train::ModelSource source = train::open_model(model);
    const auto merged = train::merged_elements(source);
    int count = 0;
    for (const auto& [name, info] : source.folder->tensors()) {
      const bool is_product =
          name.find(".experts.") != std::string::npos && !name.ends_with("bias");
      if (!is_product || ++count > 12) continue;
      SCOPED_TRACE(name);
      const at::Tensor delta = added(source, name);
      ASSERT_GT(delta.abs().max().item<double>(), 1e-4);
      const at::Tensor expected = (whole(*source.folder, name) + delta).reshape({-1});
      ASSERT_EQ(expected.numel(), info.numel());
      // Four products, their sum, the scale and the last sum: seven roundings of the largest value.
      const double bound =
          7 * 0x1p-24 * (expected.abs() + delta.reshape({-1}).abs()).max().item<double>();
      for (std::int64_t begin = 0; begin < info.numel(); begin += 613) {
        const std::int64_t end = std::min(begin + 613, info.numel());
        EXPECT_LE((merged(name, begin, end).to(at::kDouble) - expected.slice(0, begin, end))
                      .abs()
                      .max()
                      .item<double>(),
                  bound);
      }
    }
    EXPECT_GT(count, 0) << folder;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LoraOfExperts, ::testing::ValuesIn(kWithExperts), folder_name);

}  // namespace
}  // namespace tessera::golden::lora_layouts_test
