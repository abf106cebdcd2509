#include "launch/arrivals.h"

#include <numeric>
#include <random>

#include "launch/failure_record.h"
#include "support/test.h"

namespace tessera::comm::arrivals_test {
namespace {

class Counted final : public SharedCounters {
 public:
  std::int64_t add(const std::string& key, std::int64_t what) override {
    ++requests;
    return values_[key] += what;
  }
  int requests = 0;

 private:
  std::map<std::string, std::int64_t> values_;
};

std::vector<int> in_any_order(int members) {
  std::vector<int> all(static_cast<std::size_t>(members));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::mt19937(static_cast<unsigned>(members)));
  return all;
}

TEST(Arrivals, TheLastOneKnowsThatItIsInEveryOrderAndHoweverOftenTheOthersCome) {
  for (const int members : {1, 2, 61, 62, 63, 124, 125, 1024, 3844, 3845, 4096}) {
    Counted counters;
    Arrivals meeting(counters, "join", members);
    const auto order = in_any_order(members);
    for (const int member : order) {
      EXPECT_EQ(meeting.arrive(member), member == order.back()) << members;
      EXPECT_FALSE(meeting.arrive(member)) << members;
    }
  }
}

TEST(Arrivals, WhoIsMissingIsKnownAtEveryMoment) {
  for (const int members : {1, 3, 62, 63, 500}) {
    Counted counters;
    Arrivals meeting(counters, "join", members);
    std::vector<int> absent = in_any_order(members);
    while (!absent.empty()) {
      auto sorted = absent;
      std::sort(sorted.begin(), sorted.end());
      const auto found = meeting.missing();
      EXPECT_EQ(found.members, sorted) << members;
      EXPECT_FALSE(found.and_more);
      meeting.arrive(absent.back());
      absent.pop_back();
    }
    EXPECT_TRUE(meeting.missing().members.empty());
  }
}

// All that wait ask at once when a meeting fails: what each asks for does not grow with them.
TEST(Arrivals, ComingAndAskingWhoIsMissingTakeABoundedNumberOfRequests) {
  for (const int members : {2, 64, 1024, 4096}) {
    Counted counters;
    Arrivals meeting(counters, "join", members);
    const int levels = members <= 62 ? 1 : members <= 62 * 62 ? 2 : 3;
    EXPECT_EQ(meeting.missing().and_more, members > 900);
    EXPECT_LE(counters.requests, 16) << "no rank has come";
    for (int member = 0; member < members; ++member) {
      if (member == members / 2) continue;
      counters.requests = 0;
      meeting.arrive(member);
      EXPECT_LE(counters.requests, 1 + levels) << members;
    }
    counters.requests = 0;
    EXPECT_EQ(meeting.missing().members, std::vector<int>{members / 2});
    EXPECT_EQ(counters.requests, levels) << members;
  }
}

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
}  // namespace tessera::comm::arrivals_test
