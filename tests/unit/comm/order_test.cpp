// [Note: collective order]: collectives of different meaning never meet in silence.
#include <ATen/ATen.h>

#include <atomic>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "comm/queue.h"
#include "launch/wait_board.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::order_test {
namespace {

using std::chrono::milliseconds;

Batch gather(std::int64_t numel, const std::string& unit, std::uint32_t id) {
  return batch_of(AllGather{at::zeros({numel})}, unit, id);
}

// Naive: what waits knows a number, and the log keeps the last 64 entries.
TEST(FlightRecorder, AnEntryThatIsHeldKeepsItsNameHoweverManyCome) {
  FlightRecorder log("gather of ranks 0,1");
  const auto first = log.record(gather(8, "layers.0", 3), 0);
  for (std::uint64_t i = 1; i <= 200; ++i) log.record(gather(8, "later", 4), i);
  const PeerWait wait = log.wait_for(*first, 1);
  EXPECT_EQ(wait.text,
            "all_gather of layers.0 (#0, unit 3, micro-batch 0: 32 B Float) on group gather of "
            "ranks 0,1");
  EXPECT_EQ(wait.sequence, 0);
  EXPECT_EQ(wait.group, log.group_hash());
  EXPECT_EQ(wait.peer, 1);
}

TEST(InProcess, SwappedCollectivesAreNamedOnEveryRank) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  std::atomic<int> named{0};
  const std::string error = comm_error_of([&] {
    ranks.run([&](World& world) {
      const auto group = world.group({0, 1}, "gather");
      // The same sizes: Gloo's own collectives would exchange each other's data here.
      auto first = group->issue(gather(8, world.rank() == 0 ? "layers.3" : "layers.4", 17));
      try {
        first->wait();
      } catch (const Error& wrong) {
        EXPECT_THAT(wrong.what(),
                    Says("rank 0 issues all_gather of layers.3 (#0",
                         "but rank 1 issues all_gather of layers.4 (#0", "32 B Float"));
        ++named;
        throw;
      }
    });
  });
  EXPECT_EQ(named, 2);
  EXPECT_THAT(error, Says("ranks disagree"));
}

TEST(InProcess, EveryFieldOfALabelIsCompared) {
  struct Case {
    Batch zero;
    Batch one;
  };
  const auto make = [] { return gather(8, "u", 1); };
  std::vector<Case> cases(7, {make(), make()});
  cases[0].one = gather(16, "u", 1);
  cases[1].one = gather(8, "u", 2);
  cases[2].one.label.micro_batch = 1;
  cases[3].one = batch_of(AllReduce{at::zeros({8})}, "u", 1);
  cases[4].one = batch_of(AllGather{at::zeros({16}, at::kHalf)}, "u", 1);
  cases[5].one.ops.emplace_back(AllGather{at::zeros({8})});
  cases[6].one.label.controls = "set_is_last_backward(false)";
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  for (const Case& one : cases) {
    EXPECT_THAT(
        comm_error_of([&] {
          ranks.run([&](World& world) {
            world.group({0, 1}, "gather")->issue(world.rank() == 0 ? one.zero : one.one)->wait();
          });
        }),
        Says("ranks disagree"));
  }
}

TEST(InProcess, ReorderedQueueIsNamed) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  const test_hooks::Set swapped(test_hooks::hold_back, [](const Group& group, const Label& label) {
    return group.rank() == 1 && label.unit_id == 1;
  });
  const std::string error = comm_error_of([&] {
    ranks.run([&](World& world) {
      const auto group = world.group({0, 1}, "gather");
      auto a = world.queue().submit(*group, gather(8, "layers.1", 1));
      auto b = world.queue().submit(*group, gather(8, "layers.2", 2));
      a.wait();
      b.wait();
    });
  });
  // Entry 0 or entry 1, whichever is waited for first.
  EXPECT_THAT(error,
              Says("ranks disagree: rank 0 issues all_gather of layers.", "layers.1", "layers.2"));
}

TEST(InProcess, DeliveryAtWaitShowsCodeThatForgetsToWait) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  const test_hooks::Set late(test_hooks::deliver_at_wait, [] { return true; });
  ranks.run([&](World& world) {
    const auto group = world.group({0, 1}, "gather");
    auto buffer = at::zeros({2});
    buffer[world.rank()] = 1.0F;
    auto work = group->issue(batch_of(AllGather{buffer}));
    barrier(world.control(), "both have issued");
    EXPECT_EQ(buffer.sum().item<float>(), 1.0F);
    work->wait();
    EXPECT_EQ(buffer.sum().item<float>(), 2.0F);
  });
}

TEST(InProcess, LateRankIsNamedAfterTheTimeout) {
  WorldOptions options;
  options.timeout = milliseconds(50);
  ThreadRanks ranks(3, ThreadBackend::kInProcess, options);
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  if (world.rank() == 1) return;
                  barrier(world.control(), "meeting");
                });
              }),
              Says("all_reduce of meeting (#0", "waited 0.05 s for rank 1;"));
}

TEST(Gloo, ComparedEntriesNameBothRanks) {
  WorldOptions options;
  options.compare_entries = true;
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  ranks.run([](World& world) { barrier(world.control(), "fine"); });
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  world.group({0, 1}, "gather")
                      ->issue(gather(8, world.rank() == 0 ? "layers.3" : "layers.4", 17))
                      ->wait();
                });
              }),
              Says("rank 0 issues all_gather of layers.3 (#0",
                   "but rank 1 issues all_gather of layers.4 (#0"));
}

TEST(Gloo, SwappedCollectivesAreFoundWhileTheyWait) {
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  const std::string error = comm_error_of([&] {
    ranks.run([&](World& world) {
      const auto group = world.group({0, 1}, "gather");
      const bool zero = world.rank() == 0;
      auto a = group->issue(gather(8, zero ? "layers.1" : "layers.2", zero ? 1 : 2));
      auto b = group->issue(gather(8, zero ? "layers.2" : "layers.1", zero ? 2 : 1));
      // Rank 0 waits for entry 0, rank 1 for entry 1: both mean layers.1.
      (zero ? a : b)->wait();
    });
  });
  EXPECT_THAT(error, Says("rank 0 issues all_gather of layers.1 (#0",
                          "rank 1 issues all_gather of layers.2 (#0"));
}

TEST(Gloo, SkippedCollectiveIsFoundWhileTheOthersWait) {
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  const auto group = world.group({0, 1}, "gather");
                  if (world.rank() == 0) group->issue(gather(8, "skipped", 1))->wait();
                  group->issue(gather(8, "next", 2))->wait();
                });
              }),
              Says("all_gather of skipped (#0", "all_gather of next (#0"));
}

TEST(Gloo, LateRankIsNamedAfterTheTimeout) {
  WorldOptions options;
  options.timeout = milliseconds(100);
  ThreadRanks ranks(3, ThreadBackend::kGloo, options);
  ranks.run([](World& world) { barrier(world.control(), "connect"); });
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  if (world.rank() == 1) return;
                  barrier(world.control(), "meeting");
                });
              }),
              Says("all_reduce of meeting (#1", "waited 0.1 s for rank 1;"));
}

TEST(Gloo, RanksThatWaitForEachOtherInDifferentGroupsAreNamedWhileTheyWait) {
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  const auto a = world.group({0, 1}, "a");
                  const auto b = world.group({0, 1}, "b");
                  const bool zero = world.rank() == 0;
                  (zero ? a : b)->issue(gather(8, zero ? "first" : "second", 1))->wait();
                  (zero ? b : a)->issue(gather(8, zero ? "second" : "first", 1))->wait();
                });
              }),
              Says("ranks wait for each other: rank 0 waits in all_gather of first (#0",
                   "which rank 1 has not issued; rank 1 waits in all_gather of second"));
}

}  // namespace
}  // namespace tessera::comm::order_test
