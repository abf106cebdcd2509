// 256, 1, -256 in bf16: what each schedule and each narrower policy makes of it (the table at the
// end of docs/numerics.md). In bf16, 256 + 1 is 256, so every sum that is kept in it gives 0.

#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_accumulation_table_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr double kFine = 1.0 + 0x1p-10;  // exact in fp32, 1 in bf16

enum class Schedule { kSynced, kNoSync, kReplicasDeferred, kBothDeferred, kSyncedLastTwo };
constexpr Schedule kSchedules[] = {Schedule::kSynced, Schedule::kNoSync,
                                   Schedule::kReplicasDeferred, Schedule::kBothDeferred};

std::string to_string(Schedule schedule) {
  constexpr const char* kNames[] = {"synced", "no sync", "replicas deferred", "both deferred",
                                    "synced from the second on"};
  return kNames[static_cast<int>(schedule)];
}

struct Ranks {
  int count, replicas;
};
std::string name_of(const ::testing::TestParamInfo<Ranks>& info) {
  return concat(info.param.count, "ranks", info.param.replicas, "replicas");
}

/// A row of the table: storage, compute ("none": as storage), wire ("none": the default).
struct Row {
  DType storage;
  std::optional<DType> param, reduce;
};
std::string to_string(const Row& row) {
  const auto text = [](std::optional<DType> dtype) {
    return dtype ? std::string(to_string(*dtype)) : "none";
  };
  return concat(to_string(row.storage), " / ", text(row.param), " / ", text(row.reduce));
}

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBF16 = DType::kBFloat16;
const Row kRows[] = {{kF32, kBF16, {}},  {kF32, kBF16, kF32},   {kF32, kBF16, kBF16},
                     {kBF16, kBF16, {}}, {kBF16, {}, {}},       {kBF16, kBF16, kF32},
                     {kBF16, {}, kF32},  {kBF16, kBF16, kBF16}, {kBF16, {}, kBF16},
                     {kF32, {}, {}},     {kF32, {}, kBF16}};

PrecisionPolicy policy_of(const Row& row) {
  PrecisionPolicy policy;
  policy.param_dtype = row.param;
  policy.reduce_dtype = row.reduce;
  return policy;
}

enum class Bring { kAll, kFirst };  ///< which ranks have gradients that are not zero
using Between = std::function<void(const Sharded<Scale>&)>;

class AccumulationTable : public ::testing::TestWithParam<Ranks> {
 protected:
  /// One step with the raw gradients `values`, micro-batch by micro-batch, on every rank and
  /// averaged, or on the first alone and not divided. `between` is called before the last one.
  void run(const Row& row, const PrecisionPolicy& policy, Schedule schedule,
           const std::vector<double>& values, double expected, const std::string& what,
           Bring bring = Bring::kAll, const Between& between = nullptr) {
    ranks(GetParam().count).run([&](World& world) {
      const auto dtype = row.storage == kBF16 ? at::kBFloat16 : at::kFloat;
      const bool brings = bring == Bring::kAll || world.rank() == 0;
      ShardOptions options;
      if (bring == Bring::kFirst) options.divide_factor = 1.0;
      auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}, dtype))),
                                data_mesh(world, GetParam().replicas), policy, options);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool last = i + 1 == values.size();
        const bool syncs = schedule == Schedule::kSynced ||
                           schedule == Schedule::kReplicasDeferred ||
                           (schedule == Schedule::kSyncedLastTwo && i > 0);
        handle.set_requires_gradient_sync(last || syncs);
        handle.set_requires_replica_reduce(last || schedule == Schedule::kSynced ||
                                           schedule == Schedule::kNoSync ||
                                           schedule == Schedule::kSyncedLastTwo);
        if (last && between) between(handle);
        backward(handle.forward(here(at::full({kWidth}, brings ? values[i] : 0.0, dtype))).sum());
      }
      const auto final = handle.shards()[0].contract->final;
      const auto found = whole_gradients(handle).at("weight");
      EXPECT_EQ(found.scalar_type(), final == kBF16 ? at::kBFloat16 : at::kFloat);
      EXPECT_TRUE(same_bits(found, here(at::full({kWidth}, expected, found.scalar_type()))))
          << what << ", " << to_string(row) << ", " << to_string(schedule) << ": "
          << found[0].item<double>() << ", expected " << expected;
    });
  }
  void run_all(const Row& row, const PrecisionPolicy& policy, const std::vector<double>& values,
               double expected, const std::string& what, Bring bring = Bring::kAll) {
    for (const auto schedule : kSchedules)
      run(row, policy, schedule, values, expected, what, bring);
  }
};

INSTANTIATE_TEST_SUITE_P(Layouts, AccumulationTable,
                         ::testing::Values(Ranks{1, 1}, Ranks{2, 1}, Ranks{3, 1}, Ranks{2, 2},
                                           Ranks{3, 3}, Ranks{4, 2}),
                         name_of);

// FSDP2 gives 0 in some cells of its table (docs/measured/precision.md); here every cell is 1: with
// the same answer from all schedules, a schedule is a matter of speed alone.
TEST_P(AccumulationTable, IsOneInEveryCellByDefault) {
  for (const auto& row : kRows) run_all(row, policy_of(row), {256, 1, -256}, 1, "default");
}

// A 16-bit shard that torch.optim steps reads a 16-bit gradient: rounded once, after the sum.
TEST_P(AccumulationTable, IsOneWithoutAMasterToo) {
  for (const auto& row : kRows) {
    auto policy = policy_of(row);
    policy.optimizer.master = MasterRequest::kNone;
    run_all(row, policy, {256, 1, -256}, 1, "no master");
  }
}

// A requested bf16 accumulator is used: it loses the 1, alike in every schedule.
TEST_P(AccumulationTable, BFloat16SumsWhereTheyAreAskedForAreZeroInEveryCell) {
  for (const auto& row : kRows) {
    if (row.reduce != kBF16) continue;  // sums are never narrower than the wire
    auto policy = policy_of(row);
    policy.accumulate_dtype = kBF16;
    run_all(row, policy, {256, 1, -256}, 0, "accumulate bf16", Bring::kFirst);
  }
}

// A bf16 wire rounds what crosses it, and the sums on both sides keep what it brings: the 1 is lost
// exactly where 256 + 1 crosses it as one number, which one rank in a group never sends.
TEST_P(AccumulationTable, ABFloat16WireLosesTheOneOnlyWhereItsSumCrossesIt) {
  const bool shards = GetParam().count > GetParam().replicas;
  for (const auto& row : kRows) {
    const bool narrow = row.reduce == kBF16;
    run(row, policy_of(row), Schedule::kSyncedLastTwo, {256, 1, -256}, narrow && shards ? 0 : 1,
        "wire bf16");
    for (const auto schedule : kSchedules) {
      const bool in_slot = schedule == Schedule::kNoSync || schedule == Schedule::kBothDeferred;
      const bool crosses = (shards && in_slot) || GetParam().replicas > 1;
      run(row, policy_of(row), schedule, {256, 1}, narrow && crosses ? 256 : 257, "without -256");
    }
  }
}

TEST_P(AccumulationTable, RoundingOnArrivalLosesDigitsOfEachValueAndNoneOfTheSum) {
  for (const auto& row : {Row{kF32, {}, {}}, Row{kF32, {}, kF32}}) {
    auto policy = policy_of(row);
    run_all(row, policy, {256, kFine, -256}, kFine, "not asked");
    PrecisionRule rule;
    rule.match = {"weight"};
    rule.grad_dtype = kBF16;
    policy.rules = {rule};
    run_all(row, policy, {256, kFine, -256}, 1, "grad bf16");
  }
}

// The published gradient is rounded, the sum behind it is not. Who writes to the gradient makes
// what he wrote the sum.
TEST_P(AccumulationTable, ABFloat16FinalIsOneUnlessItIsWrittenToBetweenMicroBatches) {
  for (const auto& row : kRows) {
    auto policy = policy_of(row);
    policy.final_dtype = kBF16;
    run_all(row, policy, {256, 1, -256}, 1, "final bf16");
    run(row, policy, Schedule::kSynced, {256, 1, -256}, 0, "final bf16, written to", Bring::kAll,
        [](const Sharded<Scale>& handle) {
          const at::NoGradGuard no_grad;
          for (const auto& view : handle.shards()) view.shard.grad().mul_(1.0);
        });
  }
}

// Naive: the ranks' addends meet in the dtype of the wire.
TEST(AccumulationOverRanks, IsOneWhicheverRanksBringThem) {
  for (const auto& layout : {std::pair(3, 1), std::pair(3, 3), std::pair(4, 2)}) {
    const int count = layout.first;
    const int replicas = layout.second;
    for (const auto& row : kRows) {
      ranks(count).run([&, replicas](World& world) {
        const auto dtype = row.storage == kBF16 ? at::kBFloat16 : at::kFloat;
        auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}, dtype))),
                                  data_mesh(world, replicas), policy_of(row), undivided());
        constexpr double kValues[] = {256, 1, -256, 0};
        backward(handle.forward(here(at::full({kWidth}, kValues[world.rank()], dtype))).sum());
        // With two replicas of two ranks one sends 256 + 1 to the other, of which a bf16 wire
        // carries 256.
        const bool rounds = world.size() == 4 && row.reduce == kBF16;
        EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                              here(at::full({kWidth}, rounds ? 0.0F : 1.0F))))
            << to_string(row);
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_accumulation_table_test
