// A rank that fails frees the others, the first error is the one that is seen, and the World can be
// repaired.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "comm/group.h"
#include "comm/queue.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::abort_test {
namespace {

class Failing : public testing::TestWithParam<ThreadBackend> {};

TEST_P(Failing, ThrowingRankFreesTheOthersAndItsErrorIsRethrown) {
  ThreadRanks& ranks = pool(GetParam(), 3);
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> freed{0};
    std::string message;
    const double seconds = seconds_of([&] {
      try {
        ranks.run([&](World& world) {
          if (world.rank() == round) throw std::runtime_error("out of ideas");
          try {
            barrier(world.control(), "never");
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kComm);
            EXPECT_THAT(error.what(), Says("out of ideas"));
            EXPECT_TRUE(world.aborted());
            ++freed;
            throw;
          }
        });
      } catch (const std::exception& error) {
        message = error.what();
      }
    });
    EXPECT_EQ(message, "out of ideas");
    EXPECT_EQ(freed, 2);
    EXPECT_LT(seconds, 10.0) << "far below the timeout of 100 s";
  }
}

/// Errors of libtorch, each with the stack of where it was thrown behind its message.
const std::vector<std::function<void()>>& mistakes() {
  static const std::vector<std::function<void()>> all{
      [] { at::ones({2}).add(at::ones({3})); },
      [] { at::ones({2, 2}).matmul(at::ones({3})); },
      [] { at::empty({-1}); },
      [] { at::ones({2}).narrow(0, 1, 5); },
      [] { at::ones({2}).view({3}); },
      [] { at::ones({2}, at::kLong).softmax(0); }};
  return all;
}

// Property: of whichever error of libtorch on whichever rank, the errors of the library that follow
// from it, on this rank and on the others, have the message and no stack.
TEST_P(Failing, NoErrorOfTheLibraryCarriesTheStackOfLibtorchs) {
  const auto without_stack = AllOf(Not(Says("frame #")), Not(Says("Exception raised")));
  ThreadRanks& ranks = pool(GetParam(), 2);
  for (std::size_t i = 0; i < mistakes().size(); ++i) {
    const int failing = static_cast<int>(i % 2);
    std::string said;
    try {
      mistakes()[i]();
      FAIL() << "no error was thrown";
    } catch (const c10::Error& error) {
      ASSERT_THAT(error.what(), Says("Exception raised"));
      said = error.what_without_backtrace();
      said = said.substr(0, said.find('\n'));
    }
    const auto follows = AllOf(Says(said), without_stack);
    ranks.run([&](World& world) {  // agreed on
      const auto action = [&] {
        if (world.rank() == failing) mistakes()[i]();
      };
      try {
        on_all_or_none(world, "an action", action);
        ADD_FAILURE() << "no error was thrown";
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), follows);
      }
    });
    EXPECT_THROW(ranks.run([&](World& world) {  // noticed
      if (world.rank() == failing) mistakes()[i]();
      try {
        barrier(world.control(), "never");
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), follows);
        throw;
      }
    }),
                 c10::Error);
    EXPECT_THROW(ranks.run([&](World& world) {  // told by the rank itself
      try {
        if (world.rank() == failing) mistakes()[i]();
      } catch (const std::exception& error) {
        world.abort(error.what());
      }
      try {
        barrier(world.control(), "never");
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), follows);
        throw;
      }
    }),
                 Error);
  }
}

TEST_P(Failing, RankThatThrowsBeforeAGroupIsMadeFreesTheOthers) {
  ThreadRanks ranks(2, GetParam());
  const double seconds = seconds_of([&] {
    EXPECT_THROW(ranks.run([&](World& world) {
      if (world.rank() == 1) throw std::runtime_error("early");
      all_reduce(world.control(), at::zeros({1}), "never");
    }),
                 std::runtime_error);
  });
  EXPECT_LT(seconds, 10.0);
}

TEST_P(Failing, QueueIsFreedToo) {
  ThreadRanks& ranks = pool(GetParam(), 3);
  EXPECT_THROW(ranks.run([&](World& world) {
    const auto group = world.group(all_ranks(world.size()), "queue");
    if (world.rank() == 2) throw std::runtime_error("gone");
    world.queue().submit(*group, batch_of(AllGather{at::zeros({30})})).wait();
  }),
               std::runtime_error);
  ranks.run([&](World& world) {
    const auto group = world.group(all_ranks(world.size()), "queue");
    auto buffer = at::full({3}, -1.0);
    buffer[world.rank()] = world.rank();
    world.queue().submit(*group, batch_of(AllGather{buffer})).wait();
    EXPECT_EQ(buffer.sum().item<double>(), 3.0);
  });
}

TEST_P(Failing, AbortedWorldThrowsUntilAllRecover) {
  pool(GetParam(), 3).run([](World& world) {
    const auto group = world.group(all_ranks(world.size()), "gather");
    // Rank 0 takes no part in it: the others can only be freed by the abort flag.
    if (world.rank() == 0) world.abort("a bad step");
    EXPECT_THROW(group->issue(batch_of(AllGather{at::zeros({300})}))->wait(), Error);
    EXPECT_TRUE(world.aborted());
    EXPECT_THROW(group->issue(batch_of(AllGather{at::zeros({300})})), Error);
    EXPECT_THROW(world.queue().submit(*group, batch_of(AllGather{at::zeros({300})})), Error);
    world.recover();
    EXPECT_FALSE(world.aborted());
    auto sum = at::ones({1000});
    all_reduce(*group, sum, "after");
    EXPECT_EQ(sum.sum().item<float>(), 3000.0F);
    auto pending = world.queue().submit(*world.group(all_ranks(world.size()), "queue"),
                                        batch_of(AllGather{at::zeros({300})}));
    pending.wait();
  });
}

// A thread that comes late aborts what it has seen fail, not what came after it. Naive: an abort of
// the present epoch, which ends a step of ranks that have recovered. A module that an exception
// leaves aborts the World before the exception is at its thread's end.
TEST_P(Failing, TheCauseIsRethrownThoughARankThatItEndedCameFirst) {
  std::atomic<bool> told{false};
  const auto error = thrown_by([&] {
    pool(GetParam(), 2).run([&](World& world) {
      if (world.rank() == 1) {
        world.abort("an exception left the forward");
        while (!told) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the other ends meanwhile
        throw std::runtime_error("ranks differ");
      }
      try {
        barrier(world.control(), "never");
      } catch (const Error&) {
        told = true;
        throw;
      }
    });
  });
  EXPECT_EQ(error, "ranks differ");
}

TEST_P(Failing, AnAbortOfAnEarlierEpochIsIgnored) {
  std::barrier<> all_are_here(3);
  pool(GetParam(), 3).run([&](World& world) {
    const std::uint64_t before = world.recoveries();
    world.abort_epoch(before, "a bad step");
    EXPECT_TRUE(world.aborted());
    world.recover();
    EXPECT_EQ(world.recoveries(), before + 1);
    world.abort_epoch(before, "late");
    EXPECT_FALSE(world.aborted());
    auto sum = at::ones({10});
    all_reduce(world.control(), sum, "after");
    EXPECT_EQ(sum.sum().item<float>(), 30.0F);
    all_are_here.arrive_and_wait();  // no rank is in it any more
    if (world.rank() == 1) world.abort_epoch(world.recoveries(), "another bad step");
    EXPECT_THROW(barrier(world.control(), "never"), Error);
    world.recover();
  });
}

TEST_P(Failing, GroupsOutsideTheWorldAreRefused) {
  EXPECT_THROW(launch_threads(2, GetParam(), [](World& world) { world.group({0, 2}, "x"); }),
               Error);
  EXPECT_THROW(launch_threads(2, GetParam(), [](World& world) { world.group({1, 0}, "x"); }),
               Error);
  EXPECT_THROW(launch_threads(2, GetParam(), [](World& world) { world.group({1}, "x"); }), Error);
  EXPECT_THROW(launch_threads(0, GetParam(), [](World&) {}), Error);
}

TEST_P(Failing, MeshOfAnotherSizeIsRefused) {
  EXPECT_THROW(launch_threads(2, GetParam(),
                              [](World& world) { world.mesh(MeshShape::dense(1, 1, 3, 1, 1)); }),
               Error);
}

INSTANTIATE_TEST_SUITE_P(All, Failing,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& one) { return name_of(one.param); });

TEST(WorldOfOne, NeedsNoOne) {
  const auto world = World::connect();
  EXPECT_EQ(world->backend(), "none");
  EXPECT_EQ(world->size(), 1);
  barrier(world->control(), "alone");
  EXPECT_EQ(all_gather_bytes(world->control(), "me", "names"), std::vector<std::string>{"me"});
  world->abort("no");
  EXPECT_TRUE(world->aborted());
  EXPECT_THROW(barrier(world->control(), "alone"), Error);
  world->recover();
  EXPECT_FALSE(world->aborted());
  world->abort_epoch(world->recoveries() - 1, "late");
  EXPECT_FALSE(world->aborted());
}

TEST(WorldOfOne, NcclIsRefusedWhereItIsNotBuiltIn) {
  WorldOptions options;
  options.backend = "carrier pigeon";
  EXPECT_THROW(World::connect(options), Error);
}

}  // namespace
}  // namespace tessera::comm::abort_test
