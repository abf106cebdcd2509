// comm/host_read.h: the one wait of the host, that it waits enough, and what it says where nothing
// ends.
#include "comm/host_read.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "sim/streams.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::sim::host_read_test {
namespace {

using comm::Event;
using comm::EventSite;
using comm::HostWaits;
using comm::Stream;
using comm::StreamScope;
using testing::HasSubstr;

/// Both on a GPU: an event that is asked may have passed, or not yet.
class HostRead : public testing::TestWithParam<Done> {
 protected:
  void SetUp() override { set_done(GetParam()); }
  void TearDown() override { set_done(Done::kAtOnce); }
};

/// Attached to the thread while it lives, as a World's are.
struct Attached {
  explicit Attached(std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : flag(std::make_shared<comm::AbortFlag>()),
        board(std::make_shared<comm::WaitBoard>()),
        waits(std::make_shared<HostWaits>(flag, board, timeout)) {
    HostWaits::attach(waits);
  }
  ~Attached() { HostWaits::attach(nullptr); }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;

  const std::shared_ptr<comm::AbortFlag> flag;
  const std::shared_ptr<comm::WaitBoard> board;
  const std::shared_ptr<HostWaits> waits;
};

/// What is said by a wait that ends in vain.
std::string error_of(const std::function<void()>& act) {
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
    world.waits->waited_for([log, entry] { return log->wait_for(*entry); }, end);
  };
  collective(0, "layers.0");
  settle();
  const HeldStream held(stream.get());
  collective(1, "layers.1");
  for (std::uint64_t number = 2; number < 100; ++number) collective(number, "layers.2");
  const std::string error = error_of([&] { comm::read_on_host(values, "gradient norm"); });
  EXPECT_THAT(error, HasSubstr("gradient norm: waited 0.02 s for the device, where all_gather of "
                               "layers.1 (#1, unit 0, micro-batch 0: 32 B Float) on group gather "
                               "of ranks 0,1 has not ended"));
  EXPECT_EQ(world.flag->suspicion(), error);
}

TEST_P(HostRead, SaysWhereNoCollectiveIsUnderWay) {
  const Attached world(std::chrono::milliseconds(20));
  const at::Tensor values = at::zeros({8}, on(0));
  const HeldStream held(current(0));
  values.add_(1);
  EXPECT_EQ(error_of([&] { comm::read_on_host(values, "values"); }),
            "values: waited 0.02 s for the device; no collective is under way there: a kernel does "
            "not end");
  EXPECT_EQ(world.board->standing().waits, 0);
}

// What the failure watch sees of it, and how it ends a wait.
TEST_P(HostRead, StandsOnTheWaitBoardUntilTheWorldIsAborted) {
  const at::Tensor values = at::zeros({8}, on(0));
  const HeldStream held(current(0));
  values.add_(1);
  const auto flag = std::make_shared<comm::AbortFlag>();
  const auto board = std::make_shared<comm::WaitBoard>();
  std::string error;
  std::thread reader([&] {
    const auto waits = std::make_shared<HostWaits>(flag, board, std::chrono::seconds(60));
    HostWaits::attach(waits);
    error = error_of([&] { comm::read_on_host(values, "values"); });
  });
  while (board->standing().waits == 0) std::this_thread::yield();
  flag->mark("rank 1: it gave up");
  reader.join();
  EXPECT_EQ(error, "rank 1: it gave up");
  EXPECT_EQ(board->standing().waits, 0);
}

// Naive: a thread keeps what its World has lent it, and after a World that failed every read says
// why that one did.
TEST_P(HostRead, AFailedWorldThatHasGoneSaysNothing) {
  const at::Tensor values = at::full({8}, 3.0, on(0));
  const auto flag = std::make_shared<comm::AbortFlag>();
  auto waits = std::make_shared<HostWaits>(flag, std::make_shared<comm::WaitBoard>(),
                                           std::chrono::seconds(60));
  HostWaits::attach(waits);
  flag->mark("rank 1: it gave up");
  {
    const HeldStream held(current(0));
    EXPECT_EQ(error_of([&] { comm::read_on_host(values, "values"); }), "rank 1: it gave up");
  }
  waits.reset();
  expect_same_bits(comm::read_on_host(values, "values"), at::full({8}, 3.0F), "values");
}

using HostReadDeathTest = testing::Test;

TEST(HostReadDeathTest, ItsEventIsFoundIfItIsLeftOut) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto first_of = [](bool with_event) {
    const test_hooks::Set without(test_hooks::leaves_out_event,
                                  [&](EventSite site, comm::EventEnd /*end*/) {
                                    return site == EventSite::kHostRead && !with_event;
                                  });
    const at::Tensor read = comm::read_on_host(at::full({5000}, 3.0, on(0)), "values");
    return read.const_data_ptr<float>()[0];
  };
  EXPECT_EXIT(first_of(/*with_event=*/false), testing::ExitedWithCode(134),
              "the host touches pinned memory before a copy from the device has arrived");
  EXPECT_EQ(first_of(/*with_event=*/true), 3.0F);
}

INSTANTIATE_TEST_SUITE_P(Asked, HostRead, testing::Values(Done::kAtOnce, Done::kOnlyWhenWaited));

}  // namespace
}  // namespace tessera::sim::host_read_test
