// The numbers that ranks tell each other around a step, as docs/communication.md lists them.
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/test_hooks.h"
#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::step_messages_test {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kExperts = 8;

/// Own bytes of each "values of a step" and, below 0, of each "counts of a step" of rank 0, in
/// order, in a run of one step and two micro-batches.
std::vector<std::int64_t> messages(const char* family, double aux_loss_coef) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + family + "/config.json");
  auto model = nlohmann::json::parse(in);
  model["vocab_size"] = 264;
  folder.write("model.json", model.dump());
  if (aux_loss_coef > 0) config.model.aux_loss_coef = aux_loss_coef;
  config.parallelism.data_parallel_shard_degree = kRanks;
  config.training.global_batch_size = kRanks * 2;
  config.training.local_batch_size = 1;
  config.training.steps = 1;
  std::vector<std::int64_t> found;
  std::mutex mutex;
  const test_hooks::Set watched(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    const bool counts = batch.label.unit == "counts of a step";
    if (rank != 0 || !(counts || batch.label.unit == "values of a step")) return;
    const std::lock_guard lock(mutex);
    found.push_back(counts ? -batch.bytes() : batch.bytes() / kRanks);
  });
  on_ranks(kRanks, [&](World& world) { run_training(config, world); });
  return found;
}

// Asked to stop; kept labels; counts of a micro-batch; sums; the end of the step.
TEST(StepMessages, OfADenseModelAreTheDocuments) {
  EXPECT_EQ(messages("qwen3-fp32", 0), (std::vector<std::int64_t>{8, -16, 16, 32}));
}

TEST(StepMessages, ExpertsAddTheirLoads) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0),
            (std::vector<std::int64_t>{8, -16, 16, -16 * kLayers * kExperts, 32}));
}

TEST(StepMessages, AnAuxiliaryLossAddsItsCountsOnceAMicroBatch) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0.01),
            (std::vector<std::int64_t>{8, -16, -16 * kExperts, -16 * kExperts, 16,
                                       -16 * kLayers * kExperts, 32}));
}

}  // namespace
}  // namespace tessera::train::step_messages_test
