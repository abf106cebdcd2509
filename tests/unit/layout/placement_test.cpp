#include "tessera/placement.h"

#include "support/test.h"

namespace tessera::placement_test {
namespace {

TEST(Placement, IsPrintedShort) {
  EXPECT_EQ(to_string(Placement{}), "R");
  EXPECT_EQ(to_string(Placement{PlacementKind::kShard, 1}), "S(1)");
  EXPECT_EQ(to_string(Placement{PlacementKind::kPartial, 0}), "P");
  EXPECT_EQ(to_string(Placement{PlacementKind::kInvariant, 0}), "I");
}

TEST(ReductionPlan, IsPrintedInOrderOfItsSums) {
  EXPECT_EQ(to_string(ReductionPlan{}), "no sum");
  EXPECT_EQ(to_string(ReductionPlan{{"dp_shard"}, {}, 2}), "sum over dp_shard, / 2");
  EXPECT_EQ(to_string(ReductionPlan{{"dp_shard", "tp"}, {"dp_replicate"}, 1}),
            "sum over dp_shard x tp, then dp_replicate");
  EXPECT_EQ(to_string(ReductionPlan{{}, {"dp_replicate"}, 1}), "sum over dp_replicate");
}

}  // namespace
}  // namespace tessera::placement_test
