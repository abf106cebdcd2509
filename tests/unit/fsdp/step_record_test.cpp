// The record of a step's stages, as a value.

#include "fsdp/agreed/order.h"
#include "support/test.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::step_record_test {
namespace {

TEST(StepRecord, IsCompleteWhenEveryStageHasRunAlike) {
  StepRecord record;
  record.stages.resize(2);
  EXPECT_FALSE(record.is_complete());
  record.stages[0].parts = {flat({0, 1})};
  EXPECT_FALSE(record.is_complete());
  record.stages[1].parts = {flat({0, 2})};
  EXPECT_TRUE(record.is_complete());
  record.varies = true;
  EXPECT_FALSE(record.is_complete());
}

// Naive: units of two parts, or of two stages, run into each other.
TEST(StepRecord, HashTellsStagesPartsAndReachApart) {
  const std::vector<StepRecord> records{
      {{{{flat({0, 1})}, {}}}, false},
      {{{{flat({0}), flat({1})}, {}}}, false},
      {{{{flat({0})}, {}}, {{flat({1})}, {}}}, false},
      {{{{flat({0, 1})}, {}}}, true},
      {{{{flat({0, 1})}, {{false, false}}}}, false},
      {{{{flat({0, 1})}, {{true, false}}}}, false},
      {{{{flat({0, 1})}, {{true, true}}}}, false},
  };
  std::set<std::uint64_t> hashes;
  for (const auto& record : records) hashes.insert(record.hash());
  EXPECT_EQ(hashes.size(), records.size());
}

// Naive: checkpoints are counted over a whole run, so no two micro-batches are alike.
TEST(StepRecord, CheckpointsAreCountedFromTheMicroBatch) {
  const Trace later{{0, 1, 2}, {1, 2, 0}, {0, 8, 9}};
  const Trace first{{0, 1, 2}, {1, 2, 0}, {0, 1, 2}};
  EXPECT_EQ(counted_after(later, 7), first);
  EXPECT_EQ(counted_after(first, 0), first);
  EXPECT_THROW(counted_after(later, 8), Error);
}

TEST(StepRecord, FirstEntriesHaveOwnersBeforeUnitsThatShare) {
  const std::vector<std::vector<UnitId>> owners{{}, {0}, {0, 3}, {}};
  EXPECT_THAT(first_entries({flat({1, 2}), flat({1, 3})}, owners), ElementsAre(0, 1, 3, 2));
  EXPECT_THAT(first_entries({flat({3, 2, 3, 0})}, owners), ElementsAre(3, 0, 2));
  EXPECT_TRUE(first_entries({}, owners).empty());
}

TEST(StepRecord, ReachIsWhatAnyBackwardWentThrough) {
  std::vector<Reach> known;
  add_reach(known, {{true, false, false}, {false}});
  add_reach(known, {{false, true, false}, {false}});
  EXPECT_THAT(known, ElementsAre(ElementsAre(true, true, false), ElementsAre(false)));
}

}  // namespace
}  // namespace tessera::fsdp::step_record_test
