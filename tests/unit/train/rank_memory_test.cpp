// The table's lines on small plans, by hand; real bytes are counted in memory_table_test.cpp.
#include "train/rank_memory.h"

#include <exception>
#include <new>
#include <stdexcept>

#include "grad/contract_key.h"
#include "support/temporary_folder.h"
#include "train/batch_memory.h"

namespace tessera::train::rank_memory_test {
namespace {

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
  EXPECT_THAT(to_string(table), Says("set training.seq_len"));
  table.activations.emplace();
  table.activations->full = {std::int64_t{1} << 30, std::int64_t{2} << 30};
  const std::string text = to_string(table);
  EXPECT_THAT(text, Says("parameters              3.00 GiB  stored shards\n",
                         "micro-batch of 2 x 512 tokens",
                         "    full        1.00 GiB      2.00 GiB          5.00 GiB  <- "));
}

const Room kRoom{0x1p34, 0x1p34};

std::string refusal(const RowsOfRank& rows, std::int64_t logits) {
  return error_of(ErrorKind::kConfig, [&] { require_room(rows, logits, kRoom); });
}

TEST(BatchMemory, WhatCannotFitIsRefusedByTheKeyThatMendsIt) {
  EXPECT_THAT(refusal({1'000'000, 1'000'000, 1024}, 260),
              AllOf(StartsWith("training.local_batch_size: found 1000000 rows of 1024 tokens"),
                    Says("expected what the 16 GiB"), Says("lower it")));
  EXPECT_THAT(refusal({1'000'000, 1, 2048}, 260),
              StartsWith("training.global_batch_size: found 1000000 rows of 2048 tokens"));
  // Products beyond 63 bits are no smaller.
  EXPECT_THAT(refusal({1'000'000'000, 1'000'000'000, 1'000'000'000}, 1 << 30),
              StartsWith("training.local_batch_size: found 1000000000 rows"));
}

// Its logits lie in its own memory, the rows of a step in the host's.
TEST(BatchMemory, WhatADeviceComputesIsComparedWithWhatItHas) {
  const Room room{0x1p40, 0x1p34, "cuda:1"};
  const auto refused = [&](const RowsOfRank& rows, std::int64_t logits) {
    return error_of(ErrorKind::kConfig, [&] { require_room(rows, logits, room); });
  };
  EXPECT_THAT(refused({16, 16, 1 << 10}, 1 << 20),
              AllOf(StartsWith("training.local_batch_size: found 16 rows of 1024 tokens"),
                    Says("expected what the 16 GiB of cuda:1 hold; lower it")));
  require_room({16, 7, 1 << 10}, 1 << 20, room);
  require_room({1 << 24, 1, 1 << 10}, 260, room);  // 2^38 bytes of ids
  EXPECT_THAT(refused({1 << 27, 1, 1 << 10}, 260),
              AllOf(StartsWith("training.global_batch_size: found 134217728 rows"),
                    Says("expected what the 1024 GiB of this machine hold")));
}

TEST(BatchMemory, WhatMayFitIsNotRefused) {
  require_room({1 << 20, 1, 1024}, 1 << 18, kRoom);     // 2^34 bytes of ids
  require_room({8, 8, 1 << 10}, (1 << 20) - 8, kRoom);  // the same of ids and logits
  require_room({0, 0, 1}, 1, kRoom);
  EXPECT_GT(memory_bytes(), 0x1p20);
}

TEST(BatchMemory, TellsMemoryThatRanOutFromOtherErrors) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you tried to allocate 9007199254740992 bytes.")));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error("CUDA out of memory. Tried to allocate 2 GiB")));
  try {  // as a pipeline's runner says where it was
    try {
      throw std::bad_alloc();
    } catch (const std::exception&) {
      std::throw_with_nested(Error(ErrorKind::kUsage, "slot 1F0: std::bad_alloc"));
    }
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error));
  }
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("mat1 and mat2 shapes cannot be multiplied")));
  EXPECT_FALSE(is_out_of_memory(Error(ErrorKind::kComm, "rank 1 is lost: out of memory")));
  EXPECT_THAT(out_of_memory_text({8, 4, 12}, std::bad_alloc()),
              AllOf(StartsWith("training.local_batch_size: found micro-batches of 4 row(s) of 12"),
                    Says("training.seq_len"), Says("std::bad_alloc")));
}

TEST(BatchMemory, BesideBatchesItSaysWhenAndNotWhichCallsLedThere) {
  const std::runtime_error error(
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU\nframe #0: f");
  EXPECT_THAT(
      out_of_memory_text("before the first step", error,
                         DeviceThatRanOut{"cuda:1", "", 0x1p30, 0x1p31, 0x1p32}),
      AllOf(StartsWith("memory ran out before the first step of cuda:1: requested 2.00 GiB, "
                       "held 1 GiB, peak 2 GiB, reserved 4 GiB, expected room"),
            Says("more ranks"), Not(Says("frame"))));
  EXPECT_THAT(out_of_memory_text("beside forwards", std::bad_alloc()),
              StartsWith("memory ran out beside forwards, expected room"));
}

// As CUDA's allocator and the simulated device say it, and as neither does.
TEST(BatchMemory, ADeviceSaysWhereHowMuchWasAskedForAndHeld) {
  const DeviceThatRanOut device{"cuda:1", "the backward of unit layers.3", 0x1p30, 0x1p31, 0x1p32};
  const auto text = [&](const char* said) {
    return out_of_memory_text({8, 4, 12}, std::runtime_error(said), device);
  };
  EXPECT_THAT(text("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 1 has a total"),
              Says("memory ran out of cuda:1 in the backward of unit layers.3: requested "
                   "20.50 MiB, held 1 GiB, peak 2 GiB, reserved 4 GiB, expected fewer; lower it"));
  EXPECT_THAT(text("sim: out of memory. Tried to allocate 512 bytes. Expected on sim:1 at most"),
              Says("requested 512 bytes, held"));
  EXPECT_THAT(text("out of memory"), Says("requested an unknown size"));
}

}  // namespace
}  // namespace tessera::train::rank_memory_test
