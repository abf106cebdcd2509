// Training with Muon as a user does it: the same losses under every layout, and after a resumption
// on another one; which matrices of fused weights are stepped alone, and that a resumed run keeps
// it.

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "cli/program.h"
#include "io/checkpoint_manifest.h"
#include "support/test.h"

namespace tessera::cli::muon_run_test {
namespace {

using Words = std::vector<std::string>;

class MuonRun : public ::testing::Test {
 protected:
  MuonRun() {
    std::mt19937 random(20261127);
    std::string tokens;
    constexpr int kTokens = 17 * 40;
    for (int i = 0; i < kTokens; ++i) {
      const auto token = static_cast<std::uint16_t>(random() % 128);
      tokens.append(reinterpret_cast<const char*>(&token), 2);
    }
    folder_.write("ids.bin", tokens);
    folder_.write("ids.json", R"({"dtype":"uint16","vocab_size":128,"num_tokens":)" +
                                  std::to_string(kTokens) + "}");
    write_config("run.toml", "qwen3-moe-fp32", "");
  }

  void write_config(const std::string& name, const std::string& model, const std::string& rules) {
    folder_.write(name, "[model]\npath = \"" TESSERA_TEST_DATA "/" + model + R"("
[data]
path = "ids.bin"
[training]
steps = 4
seq_len = 16
global_batch_size = 4
[precision]
param_dtype = "float32"
[optimizer]
name = "Muon"
lr = 0.02
adamw_lr_scale = 0.1
no_decay = ["*norm"]
[checkpoint]
interval = 2
)" + rules);
  }

  std::vector<double> losses(const std::string& run, const Words& more,
                             const std::string& config = "run.toml") {
    const Outcome outcome =
        run_program(folder_, joined({"train", config, "--job.dump_folder", run}, more));
    EXPECT_EQ(outcome.code, 0) << run << ": " << outcome.err;
    said_ = outcome.err;
    std::vector<double> found;
    std::istringstream text(read_file(folder_ / run / "metrics/metrics.jsonl"));
    for (std::string line; std::getline(text, line);) {
      found.push_back(nlohmann::json::parse(line)["loss"].get<double>());
    }
    return found;
  }

  TemporaryFolder folder_;
  std::string said_;  ///< by the last run, on stderr
};

/// Iterations grow fp32's noise in small singular values by up to 485: 3e-5 of an update, which moves
/// a loss by some 0.1.
constexpr double kBound = 2e-5;

void expect_alike(const std::vector<double>& found, const std::vector<double>& expected,
                  const std::string& run) {
  ASSERT_EQ(found.size(), expected.size()) << run;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], kBound) << run << ", step " << i + 1;
  }
}

const Words kExperts{"--parallelism.data_parallel_shard_degree", "2",
                     "--parallelism.expert_parallel_degree", "2"};
const Words kStages{"--parallelism.pipeline_parallel_degree", "2"};

TEST_F(MuonRun, LossesAreThoseOfOneRankUnderEveryLayout) {
  const auto expected = losses("one", {});
  ASSERT_EQ(expected.size(), 4U);
  const auto adamw = losses("adamw", {"--optimizer.name", "AdamW", "--optimizer.lr", "0.002"});
  EXPECT_GT(std::abs(adamw.back() - expected.back()), 100 * kBound) << "able to fail";
  // The same micro-batches, and matrices that are whole on their stage.
  EXPECT_EQ(losses("stages", kStages), expected);
  const std::string tp = "--parallelism.tensor_parallel_degree";
  const std::string ep = "--parallelism.expert_parallel_degree";
  const std::string etp = "--parallelism.expert_tensor_parallel_degree";
  const std::vector<std::pair<std::string, Words>> layouts{
      {"shards", {"--nproc", "2"}},
      {"replicas", {"--parallelism.data_parallel_replicate_degree", "2"}},
      {"tp", {tp, "2"}},
      {"experts", kExperts},
      {"experts over tp", {tp, "2", ep, "2"}},
      {"experts cut", {tp, "2", etp, "2"}}};
  for (const auto& [run, words] : layouts) expect_alike(losses(run, words), expected, run);
}

TEST_F(MuonRun, ContinuesUnderAnotherLayout) {
  const auto expected = losses("whole", {});
  Words half = kExperts;
  half.insert(half.end(), {"--training.steps", "2"});
  ASSERT_EQ(losses("parts", half).size(), 2U);
  expect_alike(losses("parts", kStages), expected, "parts");
}

constexpr const char* kAsOne = R"(
[[optimizer.rule]]
match = ["*"]
split_fused = false
)";
const Words kHalf{"--training.steps", "2"};

// gpt-oss interleaves gate and up, Llama 4 has them side by side, Qwen3-MoE in separate tensors.
TEST_F(MuonRun, MatricesOfFusedWeightsAreSteppedAloneUnderEveryLayout) {
  for (const std::string model : {"gpt-oss-fp32", "llama4-text-fp32", "qwen3-moe-fp32"}) {
    write_config("apart.toml", model, "");
    write_config("one.toml", model, kAsOne);
    const auto expected = losses(model + "/apart", {}, "apart.toml");
    const auto as_one = losses(model + "/one", {}, "one.toml");
    ASSERT_EQ(expected.size(), 4U) << model;
    EXPECT_EQ(as_one.front(), expected.front()) << model;
    EXPECT_GT(std::abs(as_one.back() - expected.back()), 100 * kBound) << model;
    if (model == "qwen3-moe-fp32") continue;  // its layouts: above
    const Words cut{"--parallelism.tensor_parallel_degree", "2",
                    "--parallelism.expert_tensor_parallel_degree", "2"};
    expect_alike(losses(model + "/cut", cut, "apart.toml"), expected, model + ", etp");
    expect_alike(losses(model + "/experts", kExperts, "apart.toml"), expected, model + ", ep");
  }
}

TEST_F(MuonRun, AContractShowsWhatStepsFusedWeightsAsOneAndARuleWithoutEffectIsRefused) {
  const auto rule = [](const std::string& match) {
    return "[[optimizer.rule]]\nmatch = [\"" + match + "\"]\nsplit_fused = false\n";
  };
  const auto inspected = [&](const std::string& rules, const Words& more) {
    write_config("run.toml", "gpt-oss-fp32", rules);
    return run_program(folder_, joined({"inspect", "--contract", "run.toml", "--json"}, more));
  };
  const Outcome shown = succeeded(inspected(rule("*"), {}));
  const std::string said = "[optimizer] rule 1 (*): split_fused false";
  int fused = 0;
  const auto whole = nlohmann::json::parse(shown.out);
  for (const auto& parameter : whole.at("parameters")) {
    const auto name = parameter.at("name").get<std::string>();
    const bool is_fused = name.ends_with("experts.gate_up_proj");
    EXPECT_EQ(parameter.dump().find(said) != std::string::npos, is_fused) << parameter;
    fused += is_fused;
  }
  EXPECT_GT(fused, 0);
  for (const std::string match : {"*q_proj*", "*embed*", "*down_proj"}) {
    EXPECT_THAT(inspected(rule("*gate_up_proj") + rule(match), {}),
                Exits(2,
                      "optimizer.rule[2].split_fused: found the "
                      "pattern \"" +
                          match +
                          "\" that matches no "
                          "fused weight, expected one that does"))
        << match;
  }
  EXPECT_THAT(inspected(rule("*"), {"--optimizer.name", "AdamW"}),
              Exits(2,
                    "optimizer.rule[1].split_fused: found false with "
                    "AdamW, which steps every element by itself, "
                    "expected Muon"));
}

TEST_F(MuonRun, AResumedRunStepsFusedWeightsAsItsCheckpointDoes) {
  write_config("apart.toml", "gpt-oss-fp32", "");
  write_config("one.toml", "gpt-oss-fp32", kAsOne);
  const auto apart = losses("apart", {}, "apart.toml");
  const auto as_one = losses("one", {}, "one.toml");
  losses("a", kHalf, "one.toml");
  EXPECT_EQ(losses("a", {}, "apart.toml"), as_one);
  EXPECT_THAT(said_, Says("each as one matrix"));
  losses("b", kHalf, "apart.toml");
  EXPECT_EQ(losses("b", {}, "one.toml"), apart);
  EXPECT_THAT(said_, Says("the matrices of each by themselves"));
  losses("c", kHalf, "apart.toml");
  EXPECT_EQ(losses("c", {}, "apart.toml"), apart);
  EXPECT_THAT(said_, Not(Says("split_fused")));
}

// Before there was a choice each tensor of the files was one matrix.
TEST_F(MuonRun, ACheckpointThatDoesNotSayItContinuesInTheOldWay) {
  for (const std::string model : {"gpt-oss-fp32", "qwen3-moe-fp32"}) {
    write_config("apart.toml", model, "");
    write_config("one.toml", model, kAsOne);
    const bool was_one = model == "gpt-oss-fp32";
    const std::string config = was_one ? "one.toml" : "apart.toml";
    const auto expected = losses(model + "/whole", {}, config);
    losses(model + "/parts", kHalf, config);
    const auto path = folder_ / model / "parts/checkpoint/step-2/manifest.json";
    auto manifest = parse_checkpoint_manifest(read_file(path), "manifest.json");
    ASSERT_TRUE(manifest.fused_as_one.has_value());
    EXPECT_EQ(manifest.fused_as_one->size(), was_one ? 4U : 0U);
    manifest.fused_as_one.reset();
    folder_.write(model + "/parts/checkpoint/step-2/manifest.json", to_json(manifest));
    EXPECT_EQ(losses(model + "/parts", {}, "apart.toml"), expected);
    EXPECT_EQ(said_.find("split_fused") != std::string::npos, was_one) << said_;
  }
}

}  // namespace
}  // namespace tessera::cli::muon_run_test
