#include "launch/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

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
    EXPECT_LE(counters.requests, 16) << "nobody has come";
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

}  // namespace
}  // namespace tessera::comm::arrivals_test
