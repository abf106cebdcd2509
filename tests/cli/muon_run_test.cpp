// Training with Muon as a user does it: the same losses under every layout, and after a resumption
// on another one.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "cli/program.h"

namespace tessera::cli::muon_run_test {
namespace {

using testing::TemporaryFolder;
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
    folder_.write("run.toml", "[model]\npath = \"" TESSERA_TEST_DATA R"(/qwen3-moe-fp32"
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
)");
  }

  std::vector<double> losses(const std::string& run, const Words& more) {
    Words words{"train", "run.toml", "--job.dump_folder", run};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(folder_, words);
    EXPECT_EQ(outcome.code, 0) << run << ": " << outcome.err;
    std::vector<double> found;
    std::istringstream text(read_file(folder_ / run / "metrics/metrics.jsonl"));
    for (std::string line; std::getline(text, line);) {
      found.push_back(nlohmann::json::parse(line)["loss"].get<double>());
    }
    return found;
  }

  TemporaryFolder folder_;
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

TEST_F(MuonRun, GoesOnUnderAnotherLayout) {
  const auto expected = losses("whole", {});
  Words half = kExperts;
  half.insert(half.end(), {"--training.steps", "2"});
  ASSERT_EQ(losses("parts", half).size(), 2U);
  expect_alike(losses("parts", kStages), expected, "parts");
}

}  // namespace
}  // namespace tessera::cli::muon_run_test
