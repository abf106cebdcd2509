#include "layout/model_plan.h"

#include <gtest/gtest.h>

namespace tessera::layout::model_plan_test {
namespace {

BucketKey key_of_compute(DType compute) {
  BucketKey key;
  key.compute = compute;
  return key;
}

const BucketKey kFloat = key_of_compute(DType::kFloat32);
const BucketKey kHalf = key_of_compute(DType::kBFloat16);
const PlanOptions kTwo{2, 64};

std::vector<std::string> names_in(const PlannedUnit& unit, std::size_t bucket) {
  std::vector<std::string> names;
  for (const Placed& placed : unit.plan.buckets.at(bucket).parameters) {
    names.push_back(unit.items.at(placed.parameter).name);
  }
  return names;
}

TEST(ModelPlan, SmallBucketsOfInnerUnitsLieBehindTheOutermostsOwn) {
  // 4096 B is the bound: "w" has 8192 B, the norms 256 B each.
  const ModelPlan plan = plan_model({"", {{"embed", 100, kFloat}}},
                                    {{"a", {{"a.w", 4096, kHalf}, {"a.norm", 64, kFloat}}},
                                     {"b", {{"b.norm", 64, kFloat}, {"b.w", 4096, kHalf}}}},
                                    kTwo, 4096);
  ASSERT_EQ(plan.units.size(), 3U);
  ASSERT_EQ(plan.units[0].plan.buckets.size(), 2U) << "its own stays as small as it is";
  EXPECT_EQ(names_in(plan.units[0], 0), std::vector<std::string>{"embed"});
  EXPECT_EQ(names_in(plan.units[0], 1), (std::vector<std::string>{"a.norm", "b.norm"}));
  ASSERT_EQ(plan.units[2].plan.buckets.size(), 1U);
  EXPECT_EQ(names_in(plan.units[2], 0), std::vector<std::string>{"b.w"});
  for (const std::size_t inner : {1U, 2U}) {
    validate(plan.units[inner].plan, plan.units[inner].items, kTwo);
  }
}

TEST(ModelPlan, TheBoundIsOfTheUnshardedComputeDtype) {
  BucketPlan bucket = plan_unit("u", {{"w", 128, kHalf}}, kTwo).buckets[0];
  EXPECT_EQ(gathered_bytes(bucket), 256);
  EXPECT_FALSE(is_small(bucket, 256));
  EXPECT_TRUE(is_small(bucket, 257));
  EXPECT_FALSE(is_small(bucket, 0)) << "0 merges nothing";
  bucket.key.replicated = true;
  EXPECT_FALSE(is_small(bucket, 257)) << "nothing of it is gathered";
}

TEST(ModelPlan, UnitsSendTheBytesOfTheDocumentation) {
  BucketKey frozen = kFloat;
  frozen.trainable = false;
  const PlanOptions four{4, 64};
  const ModelPlan plan = plan_model(
      {"", {{"embed", 1024, kFloat}}},
      {{"a", {{"a.w", 2048, kHalf}}}, {"b", {{"b.w", 4096, kHalf}}}, {"c", {{"c.w", 512, frozen}}}},
      four, 0);
  std::vector<std::int64_t> gathers, reductions;
  for (const PlannedUnit& unit : plan.units) {
    gathers.push_back(gather_sent_bytes(unit));
    reductions.push_back(reduce_sent_bytes(unit));
  }
  // (N - 1) S c of each: 3 x 1024/4 x 4, 3 x 2048/4 x 2, 3 x 4096/4 x 2, 3 x 512/4 x 4.
  EXPECT_EQ(gathers, (std::vector<std::int64_t>{3072, 3072, 6144, 1536}));
  // (N - 1) S r in fp32, nothing of the frozen one.
  EXPECT_EQ(reductions, (std::vector<std::int64_t>{3 * 1024, 3 * 2048, 3 * 4096, 0}));
  const ModelPlan alone = plan_model({"", {{"w", 64, kHalf}}}, {}, {1, 64}, 0);
  EXPECT_EQ(reduce_sent_bytes(alone.units.front()), 0) << "one rank sends nothing";
}

// dp_shard 4 x tp 2 = dp_shard_mod_ep 2 x ep 4: a norm is summed over all eight ranks, a column
// over four, an expert over two, one that nobody shares is sent nowhere.
TEST(ModelPlan, ABucketLiesOverTheRanksOfItsOwnAxes) {
  PlanOptions options{4, 64};
  options.mesh = {MeshShape::dense(1, 1, 4, 1, 2), MeshShape::sparse(1, 1, 2, 4, 1)};
  const auto on = [](const std::vector<std::string>& axes) {
    BucketKey key = kFloat;
    key.reductions.shard_axes = axes;
    return key;
  };
  const ModelPlan plan = plan_model({"",
                                     {{"norm", 512, on({"dp_shard", "tp"})},
                                      {"column", 512, on({"dp_shard"})},
                                      {"expert", 512, on({"dp_shard_mod_ep"})},
                                      {"alone", 512, on({})}}},
                                    {}, options, 0);
  const auto& buckets = plan.units.front().plan.buckets;
  ASSERT_EQ(buckets.size(), 4U);
  EXPECT_EQ(buckets[0].ranks, 8);
  EXPECT_EQ(buckets[1].ranks, 4);
  EXPECT_EQ(buckets[2].ranks, 2);
  EXPECT_EQ(buckets[3].ranks, 1);
  const std::int64_t sent = 4 * 512 * 7 / 8 + 4 * 512 * 3 / 4 + 4 * 512 / 2;
  EXPECT_EQ(reduce_sent_bytes(plan.units.front()), sent);
  EXPECT_EQ(gather_sent_bytes(plan.units.front()), sent);
}

TEST(ModelPlan, HashesDifferWhereThePlansDo) {
  const auto hash_of = [](const BucketKey& key, std::int64_t numel, const PlanOptions& options) {
    return hash(plan_model({"", {{"w", numel, key}}}, {}, options, 0));
  };
  const std::uint64_t one = hash_of(kFloat, 100, kTwo);
  EXPECT_EQ(hash_of(kFloat, 100, kTwo), one);
  EXPECT_NE(hash_of(kHalf, 100, kTwo), one);
  EXPECT_NE(hash_of(kFloat, 101, kTwo), one);
  EXPECT_NE(hash_of(kFloat, 100, {4, 64}), one);
  EXPECT_NE(hash_of(kFloat, 100, {2, 256}), one);
}

}  // namespace
}  // namespace tessera::layout::model_plan_test
