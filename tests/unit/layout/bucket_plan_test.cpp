#include "layout/bucket_plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tessera/error.h"

namespace tessera::layout::bucket_plan_test {
namespace {

BucketKey key_with_compute(DType compute) {
  BucketKey key;
  key.compute = compute;
  return key;
}

const BucketKey kFloat = key_with_compute(DType::kFloat32);
const BucketKey kHalf = key_with_compute(DType::kBFloat16);

TEST(Range, IntersectionOfApartRangesIsEmpty) {
  EXPECT_EQ(intersect({0, 4}, {4, 8}), (Range{0, 0}));
  EXPECT_EQ(intersect({2, 9}, {4, 8}), (Range{4, 8}));
  EXPECT_EQ(intersect({5, 5}, {0, 8}), (Range{0, 0}));
  EXPECT_EQ((Range{3, 1}).size(), 0);
}

TEST(BucketPlan, MixedDtypesGiveOneBucketEach) {
  const std::vector<PlanItem> items = {{"a", 200, kFloat}, {"b", 300, kHalf}, {"c", 30, kFloat}};
  const UnitPlan plan = plan_unit("u", items, {});
  validate(plan, items, {});
  ASSERT_EQ(plan.buckets.size(), 2U);
  EXPECT_EQ(plan.buckets[0].key, kFloat);
  ASSERT_EQ(plan.buckets[0].parameters.size(), 2U);
  EXPECT_EQ(plan.buckets[0].parameters[1].parameter, 2U);
  EXPECT_EQ(plan.buckets[1].key, kHalf);
}

TEST(BucketPlan, EachParameterBeginsAtTheAlignmentOfItsComputeDtype) {
  const std::vector<PlanItem> items = {
      {"a", 1, kHalf}, {"b", 1, kHalf}, {"c", 33, kHalf}, {"d", 1, kHalf}};
  const UnitPlan plan = plan_unit("u", items, {});
  const std::vector<Placed>& placed = plan.buckets[0].parameters;
  EXPECT_EQ(placed[1].offset, 32);  // 64 bytes are 32 elements of bfloat16
  EXPECT_EQ(placed[2].offset, 64);
  EXPECT_EQ(placed[3].offset, 128);
  EXPECT_EQ(plan.buckets[0].numel, 192);
  EXPECT_EQ(plan_unit("u", items, {1, 256}).buckets[0].parameters[1].offset, 128);
}

TEST(BucketPlan, SlicesAreEqualAndAParameterMayLieInSeveral) {
  const std::vector<PlanItem> items = {{"a", 100, kFloat}, {"b", 90, kFloat}};
  const PlanOptions options{3, 64};
  const UnitPlan plan = plan_unit("u", items, options);
  validate(plan, items, options);
  const BucketPlan& bucket = plan.buckets[0];
  ASSERT_EQ(bucket.numel, 384);  // 202 rounded up to 3 x 64
  const Placed& b = bucket.parameters[1];
  EXPECT_EQ(b.offset, 112);
  EXPECT_EQ(bucket.owned(b, 0), (Range{0, 16}));
  EXPECT_EQ(bucket.offset_in_slice(b, 0), 112);
  EXPECT_EQ(bucket.owned(b, 1), (Range{16, 90}));
  EXPECT_EQ(bucket.offset_in_slice(b, 1), 0);
  EXPECT_EQ(bucket.owned(b, 2), (Range{0, 0}));
  EXPECT_EQ(bucket.offset_in_slice(b, 2), 0);
}

TEST(BucketPlan, StackedExpertsOn64RanksArePaddedByLessThanOneQuantumARank) {
  // Sharding 8 stacked experts by rows of dim 0 over 64 ranks would pad them eightfold.
  const std::vector<PlanItem> items = {{"experts", 8 * 1000 * 3, kHalf}};
  const UnitPlan plan = plan_unit("u", items, {64, 64});
  EXPECT_LT(plan.buckets[0].numel - items[0].numel, 64 * 64);
}

TEST(BucketPlan, ParametersWithoutElementsTakeNoRoom) {
  const std::vector<PlanItem> items = {
      {"a", 3, kFloat}, {"none", 0, kFloat}, {"b", 3, kFloat}, {"alone", 0, kHalf}};
  const PlanOptions options{2, 64};
  const UnitPlan plan = plan_unit("u", items, options);
  validate(plan, items, options);
  EXPECT_EQ(plan.buckets[0].parameters[2].offset, 16);
  EXPECT_EQ(plan.buckets[0].owned(plan.buckets[0].parameters[1], 0), (Range{0, 0}));
  EXPECT_EQ(plan.buckets[1].numel, 0);
  EXPECT_TRUE(plan_unit("u", {}, options).buckets.empty());
}

TEST(BucketPlan, FrozenAndTrainableAreApart) {
  BucketKey frozen = kFloat;
  frozen.trainable = false;
  EXPECT_EQ(plan_unit("u", {{"a", 1, kFloat}, {"b", 1, frozen}}, {}).buckets.size(), 2U);
}

TEST(BucketPlan, ImpossibleSizesAreRefused) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(plan_unit("u", {{"a", -1, kFloat}}, {}), Error);
  EXPECT_THROW(plan_unit("u", {{"a", kMax, kFloat}, {"b", 1, kFloat}}, {}), Error);
  EXPECT_THROW(plan_unit("u", {{"a", kMax - 63, kFloat}, {"b", 0, kFloat}}, {}), Error);
  EXPECT_THROW(plan_unit("u", {{"a", 1, kFloat}}, {0, 64}), Error);
  EXPECT_THROW(plan_unit("u", {{"a", 1, kFloat}}, {1, 6}), Error);
  EXPECT_THROW(plan_unit("u", {{"a", 1, kFloat}}, {1, 0}), Error);
  const BucketPlan bucket = plan_unit("u", {{"a", 1, kFloat}}, {2, 64}).buckets[0];
  EXPECT_THROW(bucket.slice(2), Error);
  EXPECT_THROW(bucket.slice(-1), Error);
}

TEST(BucketPlan, TheValidatorSeesEveryKindOfDamage) {
  const std::vector<PlanItem> items = {{"a", 100, kFloat}, {"b", 90, kFloat}, {"c", 5, kHalf}};
  const PlanOptions options{2, 64};
  const UnitPlan good = plan_unit("u", items, options);
  validate(good, items, options);
  const std::vector<std::function<void(UnitPlan&)>> damages = {
      [](UnitPlan& p) { p.buckets[0].numel += 64; },                  // no multiple of ranks x 64
      [](UnitPlan& p) { p.buckets[0].numel += 128; },                 // more padding than needed
      [](UnitPlan& p) { p.buckets[0].numel = 128; },                  // the end is cut off
      [](UnitPlan& p) { p.buckets[0].numel = -128; },                 //
      [](UnitPlan& p) { p.buckets[0].ranks = 1; },                    //
      [](UnitPlan& p) { p.buckets[0].parameters[1].offset = 96; },    // overlap
      [](UnitPlan& p) { p.buckets[0].parameters[1].offset = 113; },   // not aligned
      [](UnitPlan& p) { p.buckets[0].parameters[1].numel = 89; },     //
      [](UnitPlan& p) { p.buckets[0].parameters.pop_back(); },        // b is nowhere
      [](UnitPlan& p) { p.buckets[0].parameters[1].parameter = 0; },  // a twice
      [](UnitPlan& p) { p.buckets[0].parameters[1].parameter = 9; },  // no such item
      [](UnitPlan& p) { p.buckets[1].parameters.clear(); },           //
      [](UnitPlan& p) { p.buckets[0].key.reduce = DType::kBFloat16; },
      [](UnitPlan& p) { std::swap(p.buckets[0], p.buckets[1]); },
      [](UnitPlan& p) { p.buckets.pop_back(); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    UnitPlan plan = good;
    damages[i](plan);
    EXPECT_THROW(validate(plan, items, options), Error) << "damage " << i;
  }
}

TEST(BucketPlan, PrintsABucketAndAParameterALine) {
  BucketKey frozen = kHalf;
  frozen.trainable = false;
  BucketKey summed = kFloat;
  summed.reductions = {{"dp_shard"}, {}, 2};
  const std::vector<PlanItem> items = {{"w", 100, summed}, {"base", 64, frozen}};
  EXPECT_EQ(to_string(plan_unit("layers.0", items, {2, 64}), items),
            "unit layers.0\n"
            "  bucket 0: float32, accumulate float32, reduce float32, final float32, sum over "
            "dp_shard, / 2; 128 elements, 28 padding, 2 x 64\n"
            "    a rank keeps 256 B, gathers 512 B (sends 256), reduces 512 B (sends 256)\n"
            "    0 .. 100  w\n"
            "  bucket 1: float32 -> bfloat16, frozen, no sum; 128 elements, 64 padding, 2 x 64\n"
            "    a rank keeps 256 B, gathers 256 B (sends 128)\n"
            "    0 .. 64  base\n");
}

}  // namespace
}  // namespace tessera::layout::bucket_plan_test
