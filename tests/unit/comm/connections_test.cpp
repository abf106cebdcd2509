// How a group is opened: who is waited for is known meanwhile, and connections that are made when
// they are first needed are made a few at a time. [Note: connections]
#include <sched.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <numeric>
#include <thread>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/gloo/point_to_point.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::connections_test {
namespace {

using std::chrono::milliseconds;

ChannelOptions channel(std::vector<int> members, int self) {
  ChannelOptions options;
  options.name = "gather of some ranks";
  options.members = std::move(members);
  options.self = self;
  options.abort_flag = std::make_shared<AbortFlag>();
  options.board = std::make_shared<WaitBoard>();
  return options;
}

TEST(Opening, StandsOnTheBoardWithTheRankThatItWaitsFor) {
  auto options = channel({3, 5, 8}, 0);
  std::vector<Standing> seen;
  options.open = [board = options.board, &seen](int, const auto& waits_for) {
    seen.push_back(board->standing());
    waits_for(2);
    seen.push_back(board->standing());
    waits_for(-1);
    seen.push_back(board->standing());
    return c10::intrusive_ptr<c10d::Backend>();
  };
  const auto board = options.board;
  const PointToPointGroup group(std::move(options));
  ASSERT_EQ(seen.size(), 3U);
  for (const Standing& standing : seen) EXPECT_EQ(standing.waits, 1);
  EXPECT_FALSE(seen[0].wait.has_value());
  ASSERT_TRUE(seen[1].wait.has_value());
  EXPECT_EQ(seen[1].wait->peer, 8);
  EXPECT_EQ(seen[1].wait->text, "the opening of group gather of some ranks");
  EXPECT_FALSE(seen[2].wait.has_value());
  EXPECT_EQ(board->standing().waits, 0);
}

// A process that is stopped for longer than it waits, and continues: what it waited for is there.
// Naive: "waited 20 s for rank ; it is stalled".
TEST(WaitedInVain, BlamesNoOneWhereAllHaveCome) {
  const Patience patience;
  EXPECT_EQ(waited_in_vain("gather", milliseconds(20'000), {3, 5}, patience),
            "gather: waited 20 s for rank 3, 5; it is stalled, or does not take part in this "
            "collective");
  const std::string late = waited_in_vain("gather", milliseconds(20'000), {}, patience);
  EXPECT_THAT(late, Says("gather: waited 20 s and found every rank there", "comm.timeout_seconds"));
  EXPECT_THAT(late, Not(Says("for rank")));
}

// Naive: each attempt at a group leaves a log on the board, and peers read what never was issued.
TEST(Opening, ThatFailsLeavesNothingOnTheBoard) {
  auto options = channel({3, 5}, 0);
  const auto board = options.board;
  int groups = 0;
  options.open = [&](int, const auto&) -> c10::intrusive_ptr<c10d::Backend> {
    groups = board->groups();
    throw LostRank("no rank came");
  };
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THROW(const PointToPointGroup group(options), LostRank);
    EXPECT_EQ(groups, 1);
    EXPECT_EQ(board->groups(), 0);
    EXPECT_EQ(board->standing().waits, 0);
  }
}

// comm.init_timeout_seconds, not comm.timeout_seconds: ranks come to a group when they have done
// what is before it.
TEST(Opening, WaitsForARankThatComesLaterThanAStepMayWait) {
  WorldOptions options;
  options.timeout = milliseconds(300);
  options.init_timeout = milliseconds(60000);
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  ranks.run([&](World& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(3 * options.timeout);
    EXPECT_EQ(world.group(all_ranks(world.size()), "gather")->size(), 2);
  });
}

// Gloo waits in the store for the address of a rank that has gone after all had met.
TEST(Opening, OverGlooKnowsWhoDoesNotCome) {
  const auto store = Store::in_memory();
  std::vector<std::shared_ptr<WaitBoard>> boards;
  std::vector<std::future<std::string>> ranks;
  for (const int self : {0, 1}) {
    auto options = channel({4, 6, 7}, self);
    boards.push_back(options.board);
    const auto device = std::make_shared<GlooDevice>(LaunchEnvironment{});
    options.open = [=, abort_flag = options.abort_flag](int, const auto& waits_for) {
      return connect_all(*store, *device, {"group", self, 3, milliseconds(1500)}, abort_flag,
                         waits_for);
    };
    ranks.push_back(std::async(std::launch::async, [options]() -> std::string {
      try {
        const PointToPointGroup group(options);
      } catch (const LostRank& error) {
        return error.what();
      }
      return "opened";
    }));
  }
  std::array<int, 2> waits{-1, -1};
  for (auto& rank : ranks) {
    while (rank.wait_for(milliseconds(1)) != std::future_status::ready) {
      for (std::size_t i = 0; i < boards.size(); ++i) {
        if (const auto wait = boards[i]->standing().wait) waits[i] = wait->peer;
      }
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_THAT(ranks[i].get(), Says("gloo: "));
    EXPECT_EQ(waits[i], 7);
  }
}

// A rank that comes to Gloo before the others have said where they are waits for them, and does not
// take what their meeting has left in the store for an address.
TEST(Opening, OverGlooWaitsForRanksThatAreLateAfterAllHaveMet) {
  const auto store = Store::in_memory();
  std::array<std::atomic<bool>, 3> waits{};
  std::vector<std::future<bool>> ranks;
  for (const int self : {0, 1, 2}) {
    ranks.push_back(std::async(std::launch::async, [store, self, &waits] {
      const auto abort_flag = std::make_shared<AbortFlag>();
      GlooDevice device(LaunchEnvironment{});
      store->meet("group", self, {0, 1, 2}, milliseconds(60000), *abort_flag);
      // Each comes when the next one waits for those before it.
      if (self < 2) waits.at(static_cast<std::size_t>(self) + 1).wait(false);
      const auto group = connect_all(*store, device, {"group", self, 3, milliseconds(60000)},
                                     abort_flag, [&](int rank) {
                                       if (rank < 0) return;
                                       waits.at(static_cast<std::size_t>(self)) = true;
                                       waits.at(static_cast<std::size_t>(self)).notify_all();
                                     });
      // Who leaves closes connections that others still wait for.
      store->meet("connected", self, {0, 1, 2}, milliseconds(60000), *abort_flag);
      return group != nullptr;
    }));
  }
  for (auto& rank : ranks) EXPECT_TRUE(rank.get());
}

// Naive: Gloo has the address of a rank that was aborted before it connected, and waits for it, to
// the timeout, while the rank itself waits in recover() for this wait to end. Which end of a pair
// waits Gloo decides by their addresses: one of the two.
TEST(Opening, OverGlooEndsWithTheWorldThoughThePeerHasLeftItsAddress) {
  const auto store = Store::in_memory();
  GlooDevice devices[2] = {GlooDevice(LaunchEnvironment{}), GlooDevice(LaunchEnvironment{})};
  int waited = 0;
  for (const int self : {0, 1}) {
    const std::string key = concat("group ", self);
    const auto gone = std::make_shared<AbortFlag>();
    EXPECT_THROW(connect_all(*store, devices[1 - self], {key, 1 - self, 2, milliseconds(100000)},
                             gone, [&](int) { gone->mark("an exception"); }),
                 LostRank);
    const auto abort_flag = std::make_shared<AbortFlag>();
    auto opening = std::async(std::launch::async, [&]() -> std::string {
      try {
        connect_all(*store, devices[self], {key, self, 2, milliseconds(100000)}, abort_flag,
                    [](int) {});
      } catch (const LostRank& error) {
        return error.what();
      }
      return "";
    });
    // Long enough to find the address, which lies in this process.
    if (opening.wait_for(milliseconds(500)) != std::future_status::ready) {
      abort_flag->mark("rank 1: an exception");
      EXPECT_THAT(opening.get(), Says("rank 1: an exception"));
      ++waited;
    }
  }
  EXPECT_GE(waited, 1);
}

/// Counts the threads of this process by scheduling policy.
std::map<int, int> threads_by_policy() {
  std::map<int, int> count;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count[::sched_getscheduler(std::stoi(thread.path().filename().string()))];
  }
  return count;
}

// [Note: Gloo's thread] Naive: it takes the core from a rank's thread that writes, and asks for
// this thread's lock until the scheduler's next tick.
TEST(Opening, OverGlooHasAThreadThatTakesNoCoreFromOthers) {
  auto before = threads_by_policy();
  const GlooDevice device(LaunchEnvironment{});
  auto now = threads_by_policy();
  EXPECT_EQ(now[SCHED_BATCH], before[SCHED_BATCH] + 1);
  EXPECT_EQ(now[SCHED_OTHER], before[SCHED_OTHER]);
  EXPECT_EQ(::sched_getscheduler(0), SCHED_OTHER) << "the thread that made it";
}

TEST(Store, AWaitForManyKeysSaysWhichIsAbsent) {
  const auto store = Store::in_memory();
  const auto abort_flag = std::make_shared<AbortFlag>();
  std::vector<std::string> keys;
  for (int i = 0; i < 9; ++i) keys.push_back(std::to_string(i));
  std::vector<std::string> heard;
  const auto group = store->for_group("g", abort_flag, [&](const std::string& key) {
    heard.push_back(key);
    if (!key.empty()) store->set("g/" + key, "here");
  });
  for (const int there : {0, 1, 3, 4, 8}) store->set(concat("g/", there), "here");
  group->wait(keys, milliseconds(10000));
  EXPECT_EQ(heard, (std::vector<std::string>{"2", "", "5", "", "6", "", "7", ""}));
  const auto silent = store->for_group("g", abort_flag);
  try {
    silent->wait({"0", "none"}, milliseconds(5));
    FAIL();
  } catch (const LostRank& error) {
    EXPECT_STREQ(error.what(), "store: no none within 0.005 s");
  }
}

// Gloo and NCCL ask for some keys without naming a time. c10d's default of 300 s is longer than an
// init_timeout of seconds and shorter than one of hours.
TEST(Store, AWaitWithoutATimeLastsTheInitTimeout) {
  const auto abort_flag = std::make_shared<AbortFlag>();
  const auto hasty = Store::in_memory(milliseconds(5))->for_group("g", abort_flag);
  for (const auto& store : {hasty, hasty->clone()}) {
    try {
      store->get("none");
      FAIL();
    } catch (const LostRank& error) {
      EXPECT_STREQ(error.what(), "store: no none within 0.005 s");
    }
  }
  const auto patient = Store::in_memory(std::chrono::hours(2))->for_group("g", abort_flag);
  EXPECT_EQ(patient->getTimeout(), std::chrono::hours(2));
  EXPECT_EQ(patient->clone()->getTimeout(), std::chrono::hours(2));
}

// Gloo waits in threads of the library, whose errors the program may never get.
TEST(Store, AWaitThatAnAbortEndsDoesNotAcknowledgeIt) {
  const auto abort_flag = std::make_shared<AbortFlag>();
  const auto group = Store::in_memory()->for_group("g", abort_flag);
  abort_flag->mark("enough");
  EXPECT_THROW(group->wait({"none"}, milliseconds(100000)), LostRank);
  EXPECT_FALSE(abort_flag->acknowledged());
}

// A connection for which no caller waits any more is given up, though its rank has recovered.
TEST(Store, AWaitFromBeforeARecoveryEnds) {
  const auto abort_flag = std::make_shared<AbortFlag>();
  const auto group = Store::in_memory()->for_group("g", abort_flag);
  abort_flag->mark("enough");
  abort_flag->clear();
  EXPECT_THROW(group->wait({"none"}, milliseconds(100000)), LostRank);
  EXPECT_THROW(group->clone()->wait({"none"}, milliseconds(100000)), LostRank) << "nor a copy's";
}

// Naive: the thread that opens it begins to look after the recovery, and waits for a rank that
// opens another one by now.
TEST(Connections, AnAttemptFromBeforeARecoveryEnds) {
  const auto abort_flag = std::make_shared<AbortFlag>();
  const auto open_pair =
      pair_opener(Store::in_memory(), std::make_shared<GlooDevice>(LaunchEnvironment{}),
                  milliseconds(20000), abort_flag, 0, [](int) { return "group"; });
  const auto open = open_pair(0, 1);
  abort_flag->mark("enough");
  abort_flag->clear();
  try {
    open();
    FAIL();
  } catch (const LostRank& error) {
    EXPECT_THAT(error.what(), Says("before a recovery"));
  }
}

// Each takes two threads while it is opened; a direct collective needs all of them.
TEST(Connections, AreOpenedAFewAtATime) {
  std::vector<int> members(1000);
  std::iota(members.begin(), members.end(), 0);
  auto options = channel(members, 0);
  options.open = [](int, const auto&) { return c10::intrusive_ptr<c10d::Backend>(); };
  struct Seen {
    std::atomic<int> begun{0};
    std::promise<void> over;
  };
  const auto seen = std::make_shared<Seen>();
  options.open_pair = [seen, abort_flag = options.abort_flag,
                       over = std::shared_future<void>(seen->over.get_future())](int, int) {
    return [seen, over]() -> c10::intrusive_ptr<c10d::Backend> {
      ++seen->begun;
      over.wait();
      return {};
    };
  };
  options.timeout = milliseconds(200);
  PointToPointGroup group(options);
  EXPECT_THROW(group.issue(batch_of(AllGather{at::zeros({1000})})), LostRank);
  EXPECT_GE(seen->begun, 1);
  EXPECT_LE(seen->begun, 32);
  seen->over.set_value();
}

}  // namespace
}  // namespace tessera::comm::connections_test
