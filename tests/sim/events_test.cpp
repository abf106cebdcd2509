// Streams and events as libtorch sees them, and what is counted.
#include <ATen/ATen.h>

#include <latch>
#include <thread>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::events_test {
namespace {

using testing::Pair;

c10::Event recorded_on(const c10::Stream& stream) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(stream);
  return event;
}

TEST(Events, EveryStreamIsNewAndThreadsHaveTheirOwnCurrentOne) {
  const c10::Stream one = new_stream(0), two = new_stream(0);
  EXPECT_NE(one, two);
  const c10::StreamGuard here(one);
  EXPECT_EQ(current(0), one);
  EXPECT_EQ(current(1).id(), 0) << "of each device";
  std::thread([&] { EXPECT_EQ(current(0).id(), 0); }).join();
}

TEST(Events, OneThatWasNeverRecordedIsOverAndHoldsNothingBack) {
  const c10::Event event(c10::DeviceType::PrivateUse1);
  EXPECT_TRUE(event.query());
  event.synchronize();
  event.block(current(0));
}

TEST(Events, OneThatIsAskedMayAnswerEitherWay) {
  at::zeros({4}, on(0));
  set_done(Done::kOnlyWhenWaited);
  const c10::Event event = recorded_on(current(0));
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query()) << "it was waited for";
  at::zeros({4}, on(0));
  const c10::Event next = recorded_on(current(0));
  EXPECT_FALSE(next.query());
  EXPECT_FALSE(guard().queryStream(current(0)));
  set_done(Done::kAtOnce);
  EXPECT_TRUE(next.query());
  EXPECT_TRUE(guard().queryStream(current(0)));
}

// comm::read_on_host waits so: it would never end where an event says "not yet" for ever.
TEST(Events, WhoAsksAgainAndAgainWaits) {
  set_done(Done::kOnlyWhenWaited);
  at::zeros({4}, on(0));
  const c10::Event event = recorded_on(current(0));
  int asked = 0;
  for (; asked < 1000 && !event.query(); ++asked) {
  }
  EXPECT_GT(asked, 1);
  EXPECT_LT(asked, 1000);
  at::zeros({4}, on(0));
  const c10::Event next = recorded_on(current(0));
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(next.query()) << "a thread that continues in between does not wait";
    event.block(current(0));
  }
  set_done(Done::kAtOnce);
}

// Work that waits for a stalled stream stalls with it; other work continues.
TEST(Events, AHeldStreamHoldsWhatWaitsForIt) {
  const c10::Stream stalled = new_stream(0), waiting = new_stream(0), other = new_stream(0);
  const auto work_on = [](const c10::Stream& stream) {
    run_on(stream, [] { at::zeros({4}, on(0)); });
  };
  work_on(stalled);
  const c10::Event before = recorded_on(stalled);
  std::thread host;
  std::latch started(1);
  {
    const HeldStream held(stalled);
    work_on(stalled);
    work_on(other);
    wait_for(waiting, stalled);
    EXPECT_TRUE(before.query());
    EXPECT_FALSE(recorded_on(stalled).query());
    EXPECT_FALSE(recorded_on(waiting).query());
    EXPECT_TRUE(recorded_on(other).query());
    host = std::thread([&] {
      started.count_down();
      guard().synchronizeStream(waiting);  // stands still until the stream is let go
    });
    started.wait();
  }
  host.join();
  EXPECT_TRUE(recorded_on(waiting).query());
}

TEST(Events, TimeBetweenTwoIsTheHosts) {
  c10::Event first(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event second(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  first.record(current(0));
  second.record(current(0));
  EXPECT_GE(first.elapsedTime(second), 0.0);
  EXPECT_LE(second.elapsedTime(first), 0.0);
}

// A thread that waited knows; another one does not learn it from nowhere.
TEST(Events, AHostThreadOrdersWhatItLaunchesAndNoOther) {
  const c10::Stream one = new_stream(0), two = new_stream(0);
  const at::Tensor values = run_on(one, [] { return at::ones({8}, on(0)); });
  guard().synchronizeStream(one);
  EXPECT_EQ(race_of([&] { run_on(two, [&] { values.sum(); }); }), "");
  std::thread([&] {
    EXPECT_NE(race_of([&] { run_on(new_stream(0), [&] { values.sum(); }); }), "");
  }).join();
}

// Between tests all is over, for threads that waited for nothing, too; and an event of before holds
// nothing back.
TEST(Events, ASettledDeviceKeepsNothingOfBefore) {
  const c10::Stream other = new_stream(0);
  const at::Tensor values = run_on(other, [] { return at::ones({8}, on(0)); });
  const c10::Event before = recorded_on(other);
  settle();
  EXPECT_TRUE(take_counts().launches.empty());
  std::thread([&] {
    EXPECT_EQ(race_of([&] { run_on(new_stream(0), [&] { values.add_(1); }); }), "");
  }).join();
  before.block(current(0));
  EXPECT_NE(race_of([&] { values.add_(1); }), "") << "the event is not behind what came later";
}

TEST(Counts, LaunchesAndWaitsByName) {
  take_counts();
  const at::Tensor a = at::ones({4, 4}, on(0));
  at::mm(a, a).add_(1).mul_(2);
  EXPECT_TRUE(at::equal(a, a));
  EXPECT_EQ(a.sum().item<float>(), 16);
  a.cpu();
  guard().synchronizeStream(current(0));
  const Counts counts = take_counts();
  EXPECT_THAT(counts.launches,
              ElementsAre(Pair("add.out", 1), Pair("equal", 1), Pair("fill_.Scalar", 1),
                          Pair("item", 1), Pair("mm.out", 1), Pair("mul.out", 1), Pair("read", 1),
                          Pair("sum.IntList_out", 1)));
  EXPECT_THAT(counts.waits, ElementsAre(Pair("blocking read", 1), Pair("equal", 1), Pair("item", 1),
                                        Pair("synchronize stream", 1)));
  EXPECT_TRUE(take_counts().launches.empty());
}

TEST(Counts, SizesThatTheHostHasToKnowAreWaits) {
  const at::Tensor a = at::arange(6, on(0, at::kLong));
  take_counts();
  at::nonzero(a);
  a.masked_select(a > 2);
  a.index({a > 2});
  at::repeat_interleave(a);
  at::repeat_interleave(a, /*output_size=*/15);
  a.index({a});
  const at::Tensor mask = a > 2;
  mask.index_put_({a}, a > 3);
  const auto waits = take_counts().waits;
  EXPECT_THAT(waits, ElementsAre(Pair("masked_select", 1), Pair("nonzero", 2),
                                 Pair("repeat_interleave.Tensor", 1)));
}

TEST(Counts, OfEachRankAndOfOneStream) {
  take_counts();
  std::thread([] {
    const RankScope rank(3);
    at::ones({2}, on(0));
    EXPECT_EQ(take_counts().launches.at("fill_.Scalar"), 1);
  }).join();
  EXPECT_TRUE(take_counts().launches.empty());
  const c10::Stream group = new_stream(0);
  run_on(group, [] { at::ones({2}, on(0)); });
  at::zeros({2}, on(0));
  EXPECT_THAT(take_counts(current(0)).launches, ElementsAre(Pair("zero_", 1)));
}

}  // namespace
}  // namespace tessera::sim::events_test
