// comm/host_read.h: the one wait of the host, that it waits enough, and what it says where nothing
// ends.
#include "comm/host_read.h"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "launch/failure_watch.h"
#include "launch/store.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tessera/world.h"

namespace tessera::sim::host_read_test {
namespace {

using comm::Event;
using comm::EventSite;
using comm::HostWaits;
using comm::Stream;
using comm::StreamScope;

/// Both on a GPU: an event that is asked may have passed, or not yet.
class HostRead : public WhenDone {};

/// Attached to the thread while it lives, as a World's are.
struct Attached {
  explicit Attached(std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : flag(std::make_shared<comm::AbortFlag>()),
        board(std::make_shared<comm::WaitBoard>()),
        waits(std::make_shared<HostWaits>(flag, board, timeout, device(0))) {
    HostWaits::attach(waits);
  }
  ~Attached() { HostWaits::attach(nullptr); }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;

  const std::shared_ptr<comm::AbortFlag> flag;
  const std::shared_ptr<comm::WaitBoard> board;
  const std::shared_ptr<HostWaits> waits;
};

/// Returns the error of a wait that ends in vain.
std::string lost_rank_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const comm::LostRank& error) {
    return error.what();
  }
  return "no error";
}

comm::Batch gather(const std::string& unit) {
  comm::Batch batch;
  batch.label.kind = comm::Kind::kAllGather;
  batch.label.unit = unit;
  batch.ops.emplace_back(comm::AllGather{at::zeros({8})});
  return batch;
}

/// Tensors of several dtypes and forms, of which some are on the CPU.
std::vector<at::Tensor> mixed(at::Device device) {
  const at::Tensor counts = at::arange(12, at::kLong).view({3, 4});
  return {counts.to(device),
          counts.gt(5).to(device),
          at::Tensor(),
          at::full({5}, -0.5, at::kDouble),
          at::arange(6, at::kFloat).view({2, 3}).to(device).t(),
          at::empty({0}, at::kLong).to(device),
          at::full({}, 2.5, at::kBFloat16).to(device)};
}

TEST_P(HostRead, GivesTheValuesOfEachTensor) {
  for (const bool attached : {false, true}) {
    std::optional<Attached> world;
    if (attached) world.emplace();
    const auto expected = mixed(at::kCPU);
    const auto found = comm::read_on_host(mixed(device(0)), "all");
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_same_bits(found[i], expected[i], std::to_string(i));
      if (!found[i].defined()) continue;
      EXPECT_TRUE(found[i].is_cpu() && found[i].is_contiguous()) << i;
    }
  }
}

// Naive: values are read as soon as the copy was launched, and are those that were there before.
TEST_P(HostRead, WaitsForWhatItsStreamWaitsFor) {
  const Stream writer = Stream::make(device(0));
  const at::Tensor values = at::zeros({1000}, on(0));
  settle();
  Event written;
  {
    const StreamScope there(writer);
    values.fill_(3);
    written.record(writer, EventSite::kWorkEnd);
  }
  written.block(Stream::current(device(0)), EventSite::kWorkEnd);
  expect_same_bits(comm::read_on_host(values, "values"), at::full({1000}, 3.0F), "values");
}

// Naive: the copies are ordered after everything that the caller has launched meanwhile.
TEST_P(HostRead, OnAStreamApartWaitsForWhatMadeItsValuesAlone) {
  const auto expected = mixed(at::kCPU), tensors = mixed(device(0));
  const Stream here = Stream::current(device(0)), apart = Stream::make(device(0));
  comm::order(here, apart, EventSite::kIssue);
  const HeldStream held(here.get());
  at::zeros({1}, on(0));  // it does not end
  const auto found = comm::read_on_host(tensors, "all", apart);
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_same_bits(found[i], expected[i], std::to_string(i));
  }
  EXPECT_EQ(Stream::current(device(0)), here);
}

TEST_P(HostRead, StandsStillForNothingElse) {
  const std::vector<at::Tensor> tensors = mixed(device(0));
  take_counts();
  comm::read_on_host(tensors, "all");
  EXPECT_TRUE(take_counts().waits.empty()) << "it asks, and never synchronizes";
}

TEST_P(HostRead, NamesTheFirstCollectiveThatDoesNotEnd) {
  const Attached world(std::chrono::milliseconds(20));
  const Stream stream = Stream::make(device(0));
  const at::Tensor values = at::zeros({8}, on(0));
  const auto log = std::make_shared<comm::FlightRecorder>("gather of ranks 0,1");
  const auto collective = [&](std::uint64_t number, const std::string& unit) {
    const auto entry = log->record(gather(unit), number);
    {
      const StreamScope there(stream);
      at::zeros({1}, on(0));
    }
    Event end;
    end.record(stream, EventSite::kWorkEnd);
    end.block(Stream::current(device(0)), EventSite::kWorkEnd);
    world.waits->waited_for({[log, entry] { return log->wait_for(*entry); }}, end);
  };
  collective(0, "layers.0");
  settle();
  const HeldStream held(stream.get());
  collective(1, "layers.1");
  for (std::uint64_t number = 2; number < 100; ++number) collective(number, "layers.2");
  const std::string error = lost_rank_of([&] { comm::read_on_host(values, "gradient norm"); });
  EXPECT_THAT(error, Says("gradient norm: waited 0.02 s for the device, where all_gather of "
                          "layers.1 (#1, unit 0, micro-batch 0: 32 B Float) on group gather "
                          "of ranks 0,1 has not ended"));
  EXPECT_EQ(world.flag->suspicion(), error);
}

TEST_P(HostRead, SaysWhereNoCollectiveIsUnderWay) {
  const Attached world(std::chrono::milliseconds(20));
  const at::Tensor values = at::zeros({8}, on(0));
  const HeldStream held(current(0));
  values.add_(1);
  EXPECT_EQ(lost_rank_of([&] { comm::read_on_host(values, "values"); }),
            "values: waited 0.02 s for the device; no collective is under way there: a kernel does "
            "not end");
  EXPECT_EQ(world.board->standing().waits, 0);
}

// The failure watch sees the wait, and ends it.
TEST_P(HostRead, StandsOnTheWaitBoardUntilTheWorldIsAborted) {
  const at::Tensor values = at::zeros({8}, on(0));
  const HeldStream held(current(0));
  values.add_(1);
  const auto flag = std::make_shared<comm::AbortFlag>();
  const auto board = std::make_shared<comm::WaitBoard>();
  std::string error;
  std::thread reader([&] {
    const auto waits =
        std::make_shared<HostWaits>(flag, board, std::chrono::seconds(60), device(0));
    HostWaits::attach(waits);
    error = lost_rank_of([&] { comm::read_on_host(values, "values"); });
  });
  while (board->standing().waits == 0) std::this_thread::yield();
  flag->mark("rank 1: it gave up");
  reader.join();
  EXPECT_EQ(error, "rank 1: it gave up");
  EXPECT_EQ(board->standing().waits, 0);
}

// Naive: a thread keeps what its World has shared it, and after a World that failed every read says
// why that one did.
TEST_P(HostRead, AFailedWorldThatHasGoneSaysNothing) {
  const at::Tensor values = at::full({8}, 3.0, on(0));
  const auto flag = std::make_shared<comm::AbortFlag>();
  auto waits = std::make_shared<HostWaits>(flag, std::make_shared<comm::WaitBoard>(),
                                           std::chrono::seconds(60), device(0));
  HostWaits::attach(waits);
  flag->mark("rank 1: it gave up");
  {
    const HeldStream held(current(0));
    EXPECT_EQ(lost_rank_of([&] { comm::read_on_host(values, "values"); }), "rank 1: it gave up");
  }
  waits.reset();
  expect_same_bits(comm::read_on_host(values, "values"), at::full({8}, 3.0F), "values");
}

/// The first report of a rank's failure watch about its device; nothing else is wrong.
class WatchedDevice {
 public:
  explicit WatchedDevice(const Attached& world) {
    world.board->watch_device(world.waits);
    comm::FailureWatch::Actions actions;
    actions.lost = [this](const std::string& why) { said_.set_value(why); };
    watch_ = std::make_unique<comm::FailureWatch>(
        comm::Store::in_memory(), world.board,
        comm::WatchOptions{.rank = 0, .poll = std::chrono::milliseconds(2)}, std::move(actions));
  }

  /// Far longer than the timeouts of these tests: else nothing is said at all.
  std::string first_word() {
    auto said = said_.get_future();
    if (said.wait_for(std::chrono::seconds(20)) != std::future_status::ready) return "nothing";
    return said.get();
  }
  /// After so many looks.
  bool is_silent_for(std::uint64_t looks) {
    auto said = said_.get_future();
    const std::uint64_t begin = watch_->looks();
    while (watch_->looks() < begin + looks) {
      if (said.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready) return false;
    }
    return true;
  }

 private:
  std::promise<std::string> said_;
  std::unique_ptr<comm::FailureWatch> watch_;
};

/// Collectives of one group, as a backend of devices launches them.
class Collectives {
 public:
  explicit Collectives(const Attached& world) : world_(world) {}

  /// The rank's later computation is ordered after it only if it is waited for.
  Event launch(const std::string& unit, std::function<std::string()> error = {}) {
    comm::Launching launching(world_.waits, work(unit, std::move(error)));
    run_on(stream.get(), [] { at::zeros({1}, on(0)); });
    Event end;
    end.record(stream, EventSite::kWorkEnd);
    launching.launched(end);
    return end;
  }
  comm::DeviceWork work(const std::string& unit, std::function<std::string()> error = {}) {
    const auto entry = log_->record(gather(unit), next_++);
    return {[log = log_, entry] { return log->wait_for(*entry); }, std::move(error)};
  }

  const Stream stream = Stream::make(device(0));

 private:
  const Attached& world_;
  const std::shared_ptr<comm::FlightRecorder> log_ =
      std::make_shared<comm::FlightRecorder>("gather of ranks 0,1");
  std::uint64_t next_ = 0;
};

// Naive: who only looks at reads never hears of a rank that stands still in a launch, where nothing
// is on the board.
TEST(StalledDevice, IsNamedWhileTheRankStandsStillInALaunch) {
  const Attached world(std::chrono::milliseconds(50));
  Collectives collectives(world);
  collectives.launch("layers.0");
  settle();
  std::optional<HeldStream> held(std::in_place, collectives.stream.get(), 100);
  const at::Tensor values = at::zeros({8}, on(0));
  std::atomic<int> launched{0};
  std::thread rank([&] {
    collectives.launch("layers.1").block(Stream::current(device(0)), EventSite::kWorkEnd);
    collectives.launch("layers.2");
    for (; launched < 200; ++launched) values.add_(1);
  });
  while (launched < 30) std::this_thread::yield();
  WatchedDevice watched(world);
  EXPECT_EQ(watched.first_word(),
            "device: found no collective that has ended for 0.05 s, where all_gather of layers.1 "
            "(#1, unit 0, micro-batch 0: 32 B Float) on group gather of ranks 0,1 has not ended; a "
            "rank of it is stalled, or does not take part in it");
  EXPECT_EQ(world.board->standing().waits, 0);
  EXPECT_LT(launched, 100);
  held.reset();
  rank.join();
  EXPECT_EQ(launched, 200);
}

// The launch itself may have to connect to a rank that is lost.
TEST(StalledDevice, IsNamedWhereTheCollectiveItselfIsNotLaunched) {
  const Attached world(std::chrono::milliseconds(50));
  Collectives collectives(world);
  collectives.launch("layers.0");
  const comm::Launching launching(world.waits, collectives.work("layers.1"));
  WatchedDevice watched(world);
  EXPECT_THAT(watched.first_word(), Says("for 0.05 s, where all_gather of layers.1 (#1"));
}

// Naive: a collective is known once it is waited for, and the error for a gather that was issued
// ahead and stalls names the first one that is waited for.
TEST(StalledDevice, IsTheOneThatWasIssuedFirstAndNotTheOneThatIsWaitedForFirst) {
  const Attached world(std::chrono::milliseconds(20));
  Collectives collectives(world);
  const HeldStream held(collectives.stream.get());
  collectives.launch("layers.1");
  collectives.launch("layers.0").block(Stream::current(device(0)), EventSite::kWorkEnd);
  const at::Tensor values = at::zeros({8}, on(0));
  EXPECT_THAT(lost_rank_of([&] { comm::read_on_host(values, "values"); }),
              Says("values: waited 0.02 s for the device, where all_gather of layers.1 (#0"));
}

TEST(StalledDevice, IsNoneWhoseCollectivesContinueEnding) {
  const Attached world(std::chrono::milliseconds(200));
  Collectives collectives(world);
  WatchedDevice watched(world);
  std::atomic<bool> over{false};
  std::thread rank([&] {
    std::optional<HeldStream> held;
    while (!over) {
      collectives.launch("ends");
      held.emplace(collectives.stream.get());
      collectives.launch("has not ended yet");
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      held.reset();
    }
  });
  EXPECT_TRUE(watched.is_silent_for(300));  // at least 2 ms each
  over = true;
  rank.join();
}

// The thread that reads says what it reads.
TEST(StalledDevice, IsLeftToTheThreadThatReads) {
  const Attached world(std::chrono::milliseconds(500));
  Collectives collectives(world);
  const HeldStream held(collectives.stream.get());
  collectives.launch("layers.0").block(Stream::current(device(0)), EventSite::kWorkEnd);
  const at::Tensor values = at::zeros({8}, on(0));
  std::optional<WatchedDevice> watched;
  const std::string error = lost_rank_of([&] {
    watched.emplace(world);
    comm::read_on_host(values, "values");
  });
  EXPECT_THAT(error, Says("values: waited 0.5 s for the device, where all_gather of layers.0"));
}

// Without waiting for the timeout.
TEST(StalledDevice, SaysWhatItsLibraryHasNoticed) {
  const Attached world;
  Collectives collectives(world);
  const HeldStream held(collectives.stream.get());
  std::atomic<bool> is_lost{false};
  const auto error = [&] { return is_lost ? std::string("its connection is lost") : ""; };
  collectives.launch("layers.0", error).block(Stream::current(device(0)), EventSite::kWorkEnd);
  WatchedDevice watched(world);
  is_lost = true;
  const std::string said =
      "all_gather of layers.0 (#0, unit 0, micro-batch 0: 32 B Float) on group gather of ranks "
      "0,1: "
      "its connection is lost";
  EXPECT_EQ(watched.first_word(), said);
  const at::Tensor values = at::zeros({8}, on(0));
  EXPECT_EQ(lost_rank_of([&] { comm::read_on_host(values, "values"); }), "values: " + said);
}

using HostReadDeathTest = testing::Test;

TEST(HostReadDeathTest, ItsEventIsFoundIfItIsLeftOut) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto first_of = [](bool with_event, const Stream& apart) {
    const test_hooks::Set without(test_hooks::leaves_out_event,
                                  [&](EventSite site, comm::EventEnd /*end*/) {
                                    return site == EventSite::kHostRead && !with_event;
                                  });
    const at::Tensor values = at::full({5000}, 3.0, on(0));
    comm::order(Stream::current(device(0)), apart, EventSite::kIssue);
    const at::Tensor read = comm::read_on_host({values}, "values", apart).front();
    const volatile float first = read.const_data_ptr<float>()[0];  // the value is not used
    return first;
  };
  for (const Stream& apart : {Stream(), Stream::make(device(0))}) {
    EXPECT_EXIT(first_of(/*with_event=*/false, apart), testing::ExitedWithCode(134),
                "the host accesses pinned memory before a copy from the device has arrived");
    EXPECT_EQ(first_of(/*with_event=*/true, apart), 3.0F);
  }
}

INSTANTIATE_TEST_SUITE_P(Asked, HostRead, testing::Values(Done::kAtOnce, Done::kOnlyWhenWaited));

}  // namespace
}  // namespace tessera::sim::host_read_test
