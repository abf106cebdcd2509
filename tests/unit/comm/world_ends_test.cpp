// How a World ends for a host program that has its own exceptions and handlers: over a store of the
// program's, in processes that no launcher has started (store_rank.cpp).
#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/batch.h"
#include "comm/group.h"
#include "comm/queue.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "tessera/group.h"
#include "tessera/interrupt.h"
#include "tessera/world.h"
#include "unit/comm/spawned_programs.h"

namespace tessera::process_test {
namespace {

/// The outcomes of both ranks of one mode.
struct Ends {
  std::string mode;
  Outcome of[2];
};

/// All modes at once: they wait for most of their time.
std::vector<Ends> run_modes(const std::vector<std::string>& modes) {
  const TemporaryFolder folder;
  std::vector<std::pair<std::string, std::string>> runs;  // mode, store
  for (const auto& mode : modes) {
    runs.emplace_back(
        mode, runs.size() % 2 == 0 ? concat("tcp:", free_port()) : (folder.path() / mode).string());
  }
  base::Environment variables = base::environment();
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    variables.erase(name);
  }
  variables["OMP_NUM_THREADS"] = "1";
  return at_once(runs, [&](const auto& one) {
    const auto words = [&](int rank) {
      return std::vector<std::string>{TESSERA_SPAWNED_RANK, one.second, std::to_string(rank),
                                      one.first};
    };
    Program first(words(0), variables);
    Program second(words(1), variables);
    Ends ends{one.first, {}};
    ends.of[0] = first.wait();
    ends.of[1] = second.wait();
    return ends;
  });
}

const Ends& ends_of(const std::string& mode) {
  static const auto all = run_modes({"close", "fork", "fail", "interrupt", "grace", "kill", "leave",
                                     "fail-process", "fail-closing"});
  return *std::ranges::find_if(all, [&](const auto& one) { return one.mode == mode; });
}

/// The milliseconds in a line "WHAT N ms".
int ms_after(const std::string& text, const std::string& what) {
  const auto at = text.find(what);
  return at == std::string::npos ? -1 : std::atoi(text.c_str() + at + what.size());
}

void expect_done(const Outcome& outcome) {
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err << outcome.out;
  EXPECT_THAT(outcome.out, Says("done"));
  EXPECT_EQ(outcome.err, "");
}

TEST(WorldEnds, ClosedWorldsRefuseCallsAndAnotherOneOverTheStoreMeetsNoneOfTheirKeys) {
  for (const Outcome& outcome : ends_of("close").of) {
    expect_done(outcome);
    int refusals = 0;
    for (std::size_t at = 0; (at = outcome.out.find("threw ", at)) != std::string::npos; ++at) {
      EXPECT_THAT(outcome.out.substr(at, 80), Says("usage", "the World is closed"));
      ++refusals;
    }
    EXPECT_EQ(refusals, 6);
  }
}

TEST(WorldEnds, FailureOfOneRankIsThrownOnTheOtherWithItsTextWhichIsNotEndedThen) {
  const Ends& ends = ends_of("fail");
  expect_done(ends.of[1]);
  expect_done(ends.of[0]);
  EXPECT_THAT(ends.of[0].out,
              Says("threw comm after", "stopped because of rank 1: ValueError: boom"));
  EXPECT_LT(ms_after(ends.of[0].out, "threw comm after "), 2000);
  EXPECT_LT(ms_after(ends.of[1].out, "after "), 1500);
}

TEST(WorldEnds, FailureOfOneRankEndsTheProcessOfTheOtherByDefault) {
  const Ends& ends = ends_of("fail-process");
  expect_done(ends.of[1]);
  EXPECT_EQ(ends.of[0].exit_code, 1);
  EXPECT_EQ(ends.of[0].last_error_line(), "rank 0: stopped because of rank 1: ValueError: boom");
  EXPECT_THAT(ends.of[0].out, Not(Says("done")));
}

TEST(WorldEnds, ProcessThatMakesNoCallEndsAfterItsGracePeriod) {
  const Ends& ends = ends_of("grace");
  EXPECT_EQ(ends.of[0].exit_code, 1);
  EXPECT_EQ(ends.of[0].last_error_line(), "rank 0: stopped because of rank 1: ValueError: boom");
}

TEST(WorldEnds, ClosingThrowsWhatHasFailedMeanwhile) {
  const Ends& ends = ends_of("fail-closing");
  expect_done(ends.of[0]);
  EXPECT_THAT(ends.of[0].out, Says("threw comm", "stopped because of rank 1: ValueError: boom"));
}

TEST(WorldEnds, LostRankIsAnErrorOfTheCallThatWaits) {
  const Ends& ends = ends_of("kill");
  EXPECT_EQ(ends.of[1].exit_code, 1000 + SIGKILL);
  expect_done(ends.of[0]);
  EXPECT_THAT(ends.of[0].out, Says("threw comm", "rank 1"));
}

TEST(WorldEnds, InterruptLeavesACallWithItsOwnTypeAndTheOthersWaitsEnd) {
  const Ends& ends = ends_of("interrupt");
  expect_done(ends.of[0]);
  expect_done(ends.of[1]);
  EXPECT_THAT(ends.of[0].out, Says("threw Interrupt", "interrupted by the program", "recovered"));
  EXPECT_THAT(ends.of[1].out, Says("threw comm", "rank 0: interrupted", "recovered"));
  const int late = ms_after(ends.of[0].out, "left ");
  EXPECT_GE(late, 0);
  EXPECT_LT(late, 300);
}

TEST(WorldEnds, WaitForARankThatHasClosedItsWorldIsAnErrorThatNamesIt) {
  const Ends& ends = ends_of("leave");
  expect_done(ends.of[0]);
  expect_done(ends.of[1]);
  EXPECT_THAT(ends.of[0].out, Says("threw comm", "rank 1 has left"));
  EXPECT_LT(ms_after(ends.of[0].out, "threw comm after "), 6000);
}

TEST(WorldEnds, ChildOfForkDoesNothingToTheWorldOfItsParent) {
  const Ends& ends = ends_of("fork");
  expect_done(ends.of[0]);
  expect_done(ends.of[1]);
  EXPECT_THAT(ends.of[0].out,
              Says("threw usage", "made in another process", "child is done", "child ended by 0"));
  EXPECT_THAT(ends.of[0].out, Not(Says("threw nothing")));
}

/// Ranks that are threads, over a store in memory. Each returns what `body` throws.
std::vector<std::string> over_memory(int ranks, const std::function<void(int, StorePtr)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<int> numbers;
  for (int rank = 0; rank < ranks; ++rank) numbers.push_back(rank);
  return at_once(numbers, [&](int rank) { return refusal_of([&] { body(rank, store); }); });
}

WorldOptions of_threads() {
  WorldOptions options;
  options.init_timeout = std::chrono::seconds(20);
  options.lost_rank_ends = LostRankEnds::kCall;
  return options;
}

TEST(WorldOverAStore, ThreadsOverAStoreInMemoryAddUp) {
  const auto errors = over_memory(3, [](int rank, const StorePtr& store) {
    const auto world = World::from_store(store, rank, 3, of_threads());
    ASSERT_EQ(world->rank(), rank);
    ASSERT_EQ(world->local_rank(), rank);
    const auto sum = at::full({2}, rank + 1.0);
    world->group().all_reduce(sum);
    EXPECT_TRUE(sum.equal(at::full({2}, 6.0)));
    world->close();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// A thread of Python that is not joined may be in the middle of a step as the script ends. The
// groups that it would use end once all ranks are done.
TEST(WorldOverAStore, ThreadThatComputesWhileAnotherOneClosesIsRefused) {
  std::promise<void> refused;
  const auto errors = over_memory(2, [&](int rank, const StorePtr& store) {
    const auto world = World::from_store(store, rank, 2, of_threads());
    if (rank == 1) {
      refused.get_future().wait();
      return world->close();
    }
    const auto alone = world->group({0}, "alone");
    const auto closing = std::async(std::launch::async, [&] { world->close(); });
    std::string refusal;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (refusal.empty() && std::chrono::steady_clock::now() < end) {
      refusal = refusal_of([&] {
        comm::Batch batch;
        batch.label.kind = comm::Kind::kAllReduce;
        batch.label.unit = "late";
        batch.ops.push_back(comm::Combine{at::zeros({1}, at::kByte)});
        world->queue().submit(*alone, std::move(batch)).wait();
      });
    }
    EXPECT_THAT(refusal, Says("usage: the World is closed"));
    EXPECT_FALSE(world->closed()) << "rank 1 has not left";
    refused.set_value();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(WorldOverAStore, SizesThatDifferAreNamedOnOneRankAtLeast) {
  auto options = of_threads();
  options.init_timeout = std::chrono::milliseconds(300);
  const auto errors = over_memory(2, [&](int rank, const StorePtr& store) {
    World::from_store(store, rank, rank + 2, options);
  });
  EXPECT_THAT(errors, Contains(Says("usage: world: found rank", "of 2", "of 3")));
  EXPECT_THAT(errors, Each(Not(IsEmpty())));
}

TEST(WorldOverAStore, RanksOutsideAndAMissingStoreAreRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_REFUSED(kUsage, World::from_store(store, 2, 2), "rank 2 of 2", "from 0 to 1");
  EXPECT_REFUSED(kUsage, World::from_store(store, -1, 2), "rank -1 of 2");
  EXPECT_REFUSED(kUsage, World::from_store(store, 0, 0), "size 0");
  EXPECT_REFUSED(kUsage, World::from_store({}, 0, 2), "no store");
  EXPECT_EQ(World::from_store({}, 0, 1)->size(), 1);
}

TEST(WorldOverAStore, InterruptLeavesTheWaitForRanksThatDoNotComeWhoHearOfItWhenTheyDo) {
  struct Interrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const auto store = c10::make_intrusive<c10d::HashStore>();
  set_interrupt_check([] { throw Interrupt("enough"); });
  EXPECT_LT(
      seconds_of([&] { EXPECT_THROW(World::from_store(store, 0, 2, of_threads()), Interrupt); }),
      0.4);
  set_interrupt_check({});
  EXPECT_LT(seconds_of([&] {
              EXPECT_REFUSED(kComm, World::from_store(store, 1, 2, of_threads()),
                             "rank 0: interrupted");
            }),
            10);
}

TEST(WorldOfOne, ClosedWorldRefusesCalls) {
  const auto world = World::of_one();
  const auto group = world->group();
  world->close();
  EXPECT_TRUE(world->closed());
  EXPECT_REFUSED(kUsage, group.barrier("late"), "the World is closed");
  EXPECT_REFUSED(kUsage, world->group(), "the World is closed");
  EXPECT_REFUSED(kUsage, world->recover(), "the World is closed");
  world->close_failed("twice");
}

TEST(WorldOfThreads, InterruptLeavesAWaitAndTheOtherRankHearsOfIt) {
  struct Interrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const auto this_test = std::this_thread::get_id();
  std::atomic<std::thread::id> waits{this_test};
  set_interrupt_check([&] {
    if (std::this_thread::get_id() == waits.load()) throw Interrupt("enough");
  });
  std::string other;
  EXPECT_THROW(launch_threads(2, ThreadBackend::kInProcess,
                              [&](World& world) {
                                if (world.rank() == 1) {
                                  while (!world.aborted()) std::this_thread::yield();
                                  other = refusal_of([&] { world.group().barrier("late"); });
                                  return;
                                }
                                waits = std::this_thread::get_id();
                                world.group().barrier("early");
                              }),
               Interrupt);
  set_interrupt_check({});
  EXPECT_THAT(other, Says("comm", "rank 0: interrupted"));
}

}  // namespace
}  // namespace tessera::process_test
