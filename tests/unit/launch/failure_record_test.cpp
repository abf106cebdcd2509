#include "launch/failure_record.h"

#include <gtest/gtest.h>

namespace tessera::comm::failure_record_test {
namespace {

TEST(FailureRecord, SurvivesThePipe) {
  const FailureRecord record{FailureClass::kNoticed, 123456789012345, 3, 2, "two\nlines"};
  EXPECT_EQ(decode_failure(encode(record)), record);
}

TEST(FailureRecord, AnythingElseIsNone) {
  for (const char* bytes :
       {"", "\n", "1 2 3\nx", "9 1 1 1\nx", "a b c d\nx", "1 2 3 4", "1 2 3 4 5\nx"}) {
    EXPECT_FALSE(decode_failure(bytes).has_value()) << bytes;
  }
}

TEST(FailureRecord, IsShownAsItsRanksLine) {
  EXPECT_EQ(to_string({FailureClass::kPrimary, 1, 3, 2, "no memory"}), "rank 3: no memory");
}

// The first is what on_all_or_none and an aborted World throw on the rank that they name.
TEST(FailureRecord, NamesItsRankOnce) {
  EXPECT_EQ(to_string({FailureClass::kPrimary, 1, 0, 2, "rank 0: no such file"}),
            "rank 0: no such file");
  EXPECT_EQ(to_string({FailureClass::kPrimary, 1, 1, 2, "rank 10: no such file"}),
            "rank 1: rank 10: no such file");
  EXPECT_EQ(of_rank(2, of_rank(2, "a bad step")), "rank 2: a bad step");
}

TEST(FailureRecord, CulpritIsKilledBeforeFailedBeforeNoticedThenFirstByTime) {
  EXPECT_FALSE(culprit({}).has_value());
  const FailureRecord noticed{FailureClass::kNoticed, 1, 0, 1, ""};
  const FailureRecord failed{FailureClass::kPrimary, 3, 1, 1, ""};
  const FailureRecord failed_before{FailureClass::kPrimary, 2, 2, 1, ""};
  const FailureRecord killed{FailureClass::kKilled, 9, 3, 137, ""};
  EXPECT_EQ(culprit({noticed})->rank, 0);
  EXPECT_EQ(culprit({noticed, failed, failed_before})->rank, 2);
  EXPECT_EQ(culprit({noticed, failed, failed_before, killed})->rank, 3);
}

}  // namespace
}  // namespace tessera::comm::failure_record_test
