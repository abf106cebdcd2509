#include "layout/bucket_plan.h"

#include <limits>

#include "layout/model_plan.h"
#include "support/test.h"

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
// over four, an expert over two, one that no other rank shares is sent nowhere.
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
}  // namespace tessera::layout::bucket_plan_test
