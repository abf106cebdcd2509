// Before the first step a rank with more work is waited for, and who gives up says what it did.
#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "launch/abort_flag.h"
#include "launch/wait_board.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::start_up_test {
namespace {

using std::chrono::seconds;

TEST(Patience, IsThatOfAStepUntilItIsRaisedAndAfterwards) {
  Patience patience;
  EXPECT_EQ(patience.of(seconds(3)), seconds(3));
  patience.raise(seconds(10), [](int) { return std::string(); });
  EXPECT_EQ(patience.of(seconds(3)), seconds(10));
  EXPECT_EQ(patience.of(seconds(30)), seconds(30)) << "never shorter than a step's";
  patience.lower();
  EXPECT_EQ(patience.of(seconds(3)), seconds(3));
}

TEST(Patience, SaysWhatThoseDidThatHaveSaidSo) {
  Patience patience;
  EXPECT_THAT(patience.why_missing({0, 1}), Says("stalled"));
  patience.raise(seconds(1),
                 [](int rank) { return rank == 1 ? std::string("reading") : std::string(); });
  EXPECT_THAT(patience.why_missing({0, 1, 2}),
              AllOf(Says("rank 1 was busy with: reading"), Says("init_timeout"),
                    Not(Says("rank 0")), Not(Says("rank 2"))));
  EXPECT_THAT(patience.why_missing({0, 2}), Says("stalled"));
  patience.lower();
  EXPECT_THAT(patience.why_missing({1}), Says("stalled"));
}

/// Something that a thread waits in.
struct Wait : Blocked {
  void abort() override {}
};

TEST(StartUpLog, SaysWhatOthersDoOnceAWaitIsLong) {
  const auto board = std::make_shared<WaitBoard>();
  std::atomic<bool> waits = false;
  std::latch said(2);
  std::string line;
  const auto note = [&](const std::string& text) {
    if (said.try_wait()) return;  // `line` is read
    line = text;
    said.count_down();
  };
  const auto works = [&] { return waits ? std::string("rank 1: hashing the data") : "too early"; };
  const StartUpLog log(board, std::chrono::milliseconds(5), works, note);
  Wait wait;
  waits = true;
  const OnBoard on_board(*board, wait);
  said.wait();  // a second line: it is said again
  EXPECT_THAT(line, Says("start-up: waiting for", "rank 1: hashing"));
}

class StartUp : public testing::TestWithParam<ThreadBackend> {};

/// Returns what rank 1 is told when rank 0 does not come before it has given up.
std::string told_for_want_of_rank_0(ThreadRanks& ranks,
                                    const std::function<void(World&)>& rank_0_instead) {
  std::latch given_up(1);
  std::string told;
  EXPECT_THROW(ranks.run([&](World& world) {
    if (world.rank() == 0) {
      rank_0_instead(world);
      return given_up.wait();
    }
    try {
      barrier(world.control(), "what rank 0 keeps away from");
    } catch (const Error& error) {
      told = error.what();
      given_up.count_down();
      throw;
    }
  }),
               Error);
  return told;
}

TEST_P(StartUp, WaitsForARankThatWorksLongerThanAStepMay) {
  WorldOptions options;
  options.timeout = seconds(2);
  options.init_timeout = seconds(60);
  ThreadRanks ranks(2, GetParam(), options);
  ranks.run([&](World& world) {
    world.begin_start_up();
    if (world.rank() == 0) {
      world.work_at("hashing the data");
      std::this_thread::sleep_for(2 * options.timeout);
      world.work_at("");
    }
    barrier(world.control(), "hash of the data");
    world.end_start_up();
  });
  // The steps after it have their own timeout, and nothing said earlier stands in their errors.
  const auto told = told_for_want_of_rank_0(
      ranks, [](World& world) { world.work_at("what no rank hears of in a step"); });
  EXPECT_THAT(told, Says("waited 2 s for rank 0", "stalled"));
}

TEST_P(StartUp, ThatTakesTooLongNamesTheRankAndItsWork) {
  WorldOptions options;
  options.timeout = seconds(1);
  options.init_timeout = seconds(3);
  ThreadRanks ranks(2, GetParam(), options);
  ranks.run([](World& world) {
    world.begin_start_up();
    barrier(world.control(), "opened");
  });
  const auto told =
      told_for_want_of_rank_0(ranks, [](World& world) { world.work_at("hashing the data"); });
  EXPECT_THAT(told, Says("waited 3 s for rank 0", "rank 0 was busy with: hashing the data"));
}

TEST(StartUpAlone, IsNothing) {
  launch_threads(1, ThreadBackend::kInProcess, [](World& world) {
    world.begin_start_up();
    world.work_at("hashing the data");
    world.end_start_up();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, StartUp,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& one) { return name_of(one.param); });

}  // namespace
}  // namespace tessera::comm::start_up_test
