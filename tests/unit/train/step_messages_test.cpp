// The numbers that ranks tell each other around a step, as docs/communication.md lists them.
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "comm/sent_bytes.h"
#include "dist/ranks.h"
#include "train/rank_sum_stand_in.h"
#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::step_messages_test {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kExperts = 8;

/// Own bytes of each "values of a step" of rank 0, in order, in a run of one step and two
/// micro-batches.
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
  comm::Hub::Bend watch;
  watch.before_issue = [&](int rank, const comm::Batch& batch) {
    if (rank != 0 || batch.label.unit != "values of a step") return;
    const std::lock_guard lock(mutex);
    // A gather holds every rank's bytes, a sum the own ones.
    const bool sums = std::holds_alternative<comm::AllReduce>(batch.ops.front());
    found.push_back(sums ? batch.bytes() : batch.bytes() / kRanks);
  };
  test::ranks(kRanks).bend_for_tests(watch);
  on_ranks(kRanks, [&](World& world) { run_training(config, world); });
  test::ranks(kRanks).bend_for_tests({});
  return found;
}

// Asked to stop; kept labels; counts of a micro-batch; sums; the end of the step.
TEST(StepMessages, OfADenseModelAreTheDocuments) {
  EXPECT_EQ(messages("qwen3-fp32", 0), (std::vector<std::int64_t>{8, 8, 16, 32}));
}

TEST(StepMessages, ExpertsAddTheirLoads) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0),
            (std::vector<std::int64_t>{8, 8, 8 * (2 + kLayers * kExperts), 32}));
}

TEST(StepMessages, AnAuxiliaryLossAddsItsCountsOnceAMicroBatch) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0.01),
            (std::vector<std::int64_t>{8, 8, 8 * kExperts, 8 * kExperts,
                                       8 * (2 + kLayers * kExperts), 32}));
}

struct Weight : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({4}));
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
};

// Naive: every rank's counts go to every rank. Two rounds of a sum send less than twice the own
// ones, with the bits of the sum in rank order.
TEST(StepMessages, WhatARankSendsOfManyCountsDoesNotGrowWithTheRanks) {
  constexpr std::int64_t kCounts = 94 * 128;  // Qwen3-235B-A22B
  for (const int count : {2, 3, 5, 8}) {
    const auto values_of = [&](int rank) {
      std::vector<double> values;
      for (std::int64_t i = 0; i < kCounts; ++i) {
        values.push_back(0.1 * static_cast<double>((i * 31 + rank * 17) % 1009));
      }
      return values;
    };
    std::vector<std::vector<double>> all;
    for (int rank = 0; rank < count; ++rank) all.push_back(values_of(rank));
    std::int64_t sent = 0;
    comm::Hub::Bend watch;
    watch.before_issue = [&](int rank, const comm::Batch& batch) {
      if (rank != 0 || batch.label.unit != "values of a step") return;
      for (const auto& op : batch.ops) sent += comm::sent_bytes(op, count, rank);
    };
    test::ranks(count).bend_for_tests(watch);
    test::ranks(count).run([&](World& world) {
      auto handle = fully_shard(std::make_shared<Weight>(), test::data_mesh(world));
      EXPECT_EQ(sum_over_ranks(handle, RankSum::kStep, values_of(world.rank())),
                added_by_rank(all));
    });
    test::ranks(count).bend_for_tests({});
    EXPECT_GT(sent, 0);
    EXPECT_LT(sent, 2 * kCounts * 8) << count << " ranks";
  }
}

}  // namespace
}  // namespace tessera::train::step_messages_test
