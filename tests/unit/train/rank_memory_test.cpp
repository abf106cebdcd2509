// The table's lines on small plans, by hand; real bytes are counted in memory_table_test.cpp.
#include "train/rank_memory.h"

#include <gmock/gmock.h>

#include "grad/contract_key.h"
#include "tessera/error.h"

namespace tessera::train::rank_memory_test {
namespace {

using ::testing::HasSubstr;

GradContract contract(const std::string& name, std::int64_t numel) {
  GradContract made;
  made.name = name;
  made.shape = {numel};
  made.storage = {DType::kFloat32};
  made.compute = {DType::kBFloat16};
  made.reductions = {{std::string(axis::kShard)}, {std::string(axis::kReplicate)}, 1.0};
  return made;
}

/// A root of 64 elements and three units of 1000, 2000 and 600; no bucket is small.
struct Case {
  int shards = 2;
  int replicas = 1;
  RankMemoryOptions options = {};
  void (*change)(GradContract&) = [](GradContract&) {};

  RankMemory memory(std::optional<int> rank = std::nullopt) const {
    std::vector<GradContract> contracts;
    std::vector<layout::UnitItems> units;
    for (const auto& [name, numel] : std::vector<std::pair<std::string, std::int64_t>>{
             {"root", 64}, {"a", 1000}, {"b", 2000}, {"c", 600}}) {
      contracts.push_back(contract(name, numel));
      change(contracts.back());
      units.push_back({name, {plan_item(contracts.back())}});
    }
    layout::PlanOptions plan;
    plan.ranks = shards;
    plan.mesh = MeshShape::dense(1, replicas, shards, 1, 1);
    const layout::UnitItems root = units.front();
    units.erase(units.begin());
    return rank_memory(contracts, layout::plan_model(root, units, plan, 0), options, rank);
  }
};

// Shards and sums of gradients have their padding (64, 1024, 2048, 640 elements of two slices),
// moments do not: the first rank owns its slices whole, the second what is left.
TEST(RankMemory, TwoRanksHoldHalfOfEachLine) {
  const RankMemory first = Case{}.memory(0);
  constexpr std::int64_t slices = (128 + 1024 + 2048 + 640) / 2;
  EXPECT_EQ(first.parameters, slices * 4);
  EXPECT_EQ(first.gradients, slices * 4);
  EXPECT_EQ(first.moments, 2 * (64 + 512 + 1024 + 320) * 4);
  EXPECT_EQ(first.master, 0);
  EXPECT_EQ(first.raw_gradient, 2000 * 2);
  EXPECT_EQ(first.unsharded, (128 + 1024 + 2048) * 2) << "the root and the two largest neighbours";
  const RankMemory second = Case{}.memory(1);
  EXPECT_EQ(second.moments, 2 * (0 + 488 + 976 + 280) * 4);
  EXPECT_EQ(Case{}.memory(), first) << "no rank needs more";
}

TEST(RankMemory, OneRankThatComputesInItsStorageDtypeGathersAndReducesNothing) {
  Case alone{.shards = 1};
  EXPECT_EQ(alone.memory().unsharded, (64 + 1024 + 2048) * 2) << "casts";
  EXPECT_EQ(alone.memory().reductions, 0);
  alone.change = [](GradContract& one) { one.compute = {DType::kFloat32}; };
  EXPECT_EQ(alone.memory().unsharded, 0);
}

TEST(RankMemory, WithoutReshardingAllUnitsStayUnsharded) {
  const Case kept{.options = {.reshard = Reshard::kNo}};
  EXPECT_EQ(kept.memory().unsharded, (128 + 1024 + 2048 + 640) * 2);
}

// A sum over replicas has memory of its own; so has a final gradient of another dtype, or one that
// is divided.
TEST(RankMemory, GradientsHaveASliceForEachOfTheirForms) {
  const std::int64_t slice = Case{}.memory().gradients / 4;
  EXPECT_EQ((Case{.replicas = 2}.memory().gradients), slice * 8);
  const auto narrow = [](GradContract& one) { one.final = DType::kBFloat16; };
  EXPECT_EQ((Case{.change = narrow}.memory().gradients), slice * (4 + 2));
  EXPECT_EQ((Case{.replicas = 2, .change = narrow}.memory().gradients), slice * (8 + 2));
  EXPECT_EQ((Case{.options = {.scales_loss = true}}.memory().gradients), slice * 8);
}

TEST(RankMemory, SixteenBitShardsHaveAMasterAndFrozenOnesNothing) {
  const Case remainder{.change = [](GradContract& one) {
    one.storage = {DType::kBFloat16};
    one.master = Master::kRemainder;
  }};
  const std::int64_t owned = 64 + 512 + 1024 + 320;
  EXPECT_EQ(remainder.memory(0).master, owned * 2);
  EXPECT_EQ(remainder.memory(0).moments, owned * 8);
  const Case frozen{.change = [](GradContract& one) { one.trainable = false; }};
  EXPECT_EQ(frozen.memory().gradients, 0);
  EXPECT_EQ(frozen.memory().moments, 0);
  EXPECT_EQ(frozen.memory().reductions, 0);
  EXPECT_EQ(frozen.memory().raw_gradient, 0);
  EXPECT_GT(frozen.memory().parameters, 0);
}

// Naive: the slots of one unit. Gradients that no reduction takes away pile up, unsharded.
TEST(RankMemory, MicroBatchesWithoutAReductionKeepAllSlots) {
  constexpr std::int64_t all = (128 + 1024 + 2048 + 640) * 4;
  Case deferred{.options = {.defers_reductions = true, .in_flight_bytes = 0}};
  EXPECT_EQ(deferred.memory().reductions, all + 2048 / 2 * 4) << "and what one receives";
  Case each{.options = {.in_flight_bytes = 0}};
  EXPECT_EQ(each.memory().reductions, std::min<std::int64_t>(all, (128 + 2 * 2048) * 4) + 4096);
}

// Of the rank with most rows; a batch that train would refuse on so many ranks is no error here.
TEST(RankMemoryOptions, ReductionsWaitWhereARankHasSeveralMicroBatches) {
  Config config;
  config.training.global_batch_size = 13;
  const auto defers = [&](int ranks, std::int64_t local, bool sync) {
    config.training.local_batch_size = local;
    config.training.sync_every_micro_batch = sync;
    return rank_memory_options(config, {.dp_shard = ranks}, {}).defers_reductions;
  };
  EXPECT_TRUE(defers(3, 4, false)) << "4 + 1 rows";
  EXPECT_FALSE(defers(3, 4, true));
  EXPECT_FALSE(defers(3, 5, false));
  EXPECT_FALSE(defers(64, 1, false));
}

TEST(MemoryTableText, MarksTheModeAndSaysWhatIsMissing) {
  MemoryTable table{.mode = RecomputeMode::kFull, .rows = 2, .positions = 512};
  table.held.parameters = std::int64_t{3} << 30;
  EXPECT_THAT(to_string(table), HasSubstr("set training.seq_len"));
  table.activations.emplace();
  table.activations->full = {std::int64_t{1} << 30, std::int64_t{2} << 30};
  const std::string text = to_string(table);
  EXPECT_THAT(text, HasSubstr("parameters              3.00 GiB  stored shards\n"));
  EXPECT_THAT(text, HasSubstr("micro-batch of 2 x 512 tokens"));
  EXPECT_THAT(text, HasSubstr("    full        1.00 GiB      2.00 GiB          5.00 GiB  <- "));
}

}  // namespace
}  // namespace tessera::train::rank_memory_test
