// comm/stream.h: the order that the library's own names make, and none where one is left out.
#include "comm/stream.h"

#include <ATen/ATen.h>

#include "comm/turns.h"
#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::stream_test {
namespace {

using comm::Event;
using comm::Stream;
using comm::StreamScope;

constexpr auto kSite = comm::EventSite::kIssue;

/// Returns the report where values that are written on one stream are read on another, and only
/// `order` orders the two.
template <class Order>
std::string race_with(const Order& order) {
  const Stream writer = Stream::make(device(0)), reader = Stream::make(device(0));
  const at::Tensor values = at::zeros({8}, on(0));
  settle();
  return race_of([&] {
    {
      const StreamScope there(writer);
      values.add_(1);
    }
    order(writer, reader);
    const StreamScope here(reader);
    values.neg();
  });
}

TEST(Streams, AnEventOrdersTwoStreams) {
  EXPECT_EQ(race_with([](const Stream& writer, const Stream& reader) {
              Event event;
              event.record(writer, kSite);
              event.block(reader, kSite);
            }),
            "");
}

TEST(Streams, AMissingRecordIsFound) {
  EXPECT_THAT(race_with([](const Stream&, const Stream& reader) { Event().block(reader, kSite); }),
              Says("neg"));
}

TEST(Streams, AMissingBlockIsFound) {
  EXPECT_THAT(race_with([](const Stream& writer, const Stream&) { Event().record(writer, kSite); }),
              Says("neg"));
}

TEST(Streams, EachOfTwoPassesThatTakeTurnsHasItsOwnCurrentOne) {
  const Stream usual = Stream::current(device(0)), side = Stream::make(device(0));
  comm::Turns turns(device(0));
  const auto on_side = [&] {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(Stream::current(device(0)), usual);
      const StreamScope there(side);
      comm::Turns::pass();
      EXPECT_EQ(Stream::current(device(0)), side);
    }
  };
  const auto on_usual = [&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(Stream::current(device(0)), usual);
      comm::Turns::pass();
    }
  };
  turns.run(on_side, on_usual);
  turns.run(on_usual, on_side);
  EXPECT_EQ(Stream::current(device(0)), usual);
}

// CUDA's streams: c10::cuda::getStreamFromPool returns 32 of each priority in turn.
TEST(Streams, AreSaidToBeSharedOnceThereAreMoreThanLibtorchHas) {
  const c10::Device card(c10::kCUDA, 1);
  for (const auto use : {comm::StreamUse::kRank, comm::StreamUse::kOtherRanks}) {
    for (const int made : {1, 32, 34, 100}) {
      EXPECT_EQ(comm::shared_stream_warning(card, use, made), "") << made;
    }
    EXPECT_EQ(comm::shared_stream_warning(device(0), use, 33), "");
  }
  EXPECT_THAT(comm::shared_stream_warning(card, comm::StreamUse::kOtherRanks, 33),
              Says("device cuda:1: found more than 32 streams of groups and messages",
                   "what shares one waits for each other"));
  EXPECT_THAT(comm::shared_stream_warning(card, comm::StreamUse::kRank, 33),
              Says("more than 32 streams of the rank's computation"));
}

TEST(Streams, OfOtherRanksAreOfAHigherPriority) {
  const int before = streams_of_higher_priority(0);
  Stream::make(device(0));
  EXPECT_EQ(streams_of_higher_priority(0), before);
  Stream::make(device(0), comm::StreamUse::kOtherRanks);
  EXPECT_EQ(streams_of_higher_priority(0), before + 1);
}

TEST(Streams, AScopeIsTheCurrentStreamWhileItLives) {
  const Stream before = Stream::current(device(1)), made = Stream::make(device(1));
  EXPECT_NE(before, made);
  {
    const StreamScope scope(made);
    EXPECT_EQ(Stream::current(device(1)), made);
    EXPECT_EQ(Stream::current(c10::Device(device(1).type())), made) << "its device is current, too";
  }
  EXPECT_EQ(Stream::current(device(1)), before);
}

// Naive: recording an event again moves the point of those who wait for the first.
TEST(Streams, ACopyOfAnEventKeepsItsPoint) {
  const Stream stream = Stream::make(device(0));
  const StreamScope scope(stream);
  const at::Tensor values = at::zeros({8}, on(0));
  settle();
  Event event;
  event.record(stream, kSite);
  const Event first = event;
  values.add_(1);
  const HeldStream held(stream.get());
  values.add_(1);
  event.record(stream, kSite);
  EXPECT_FALSE(event.done());
  EXPECT_TRUE(first.done());
}

TEST(Streams, AnEventThatIsUsedAgainMayChangeItsDevice) {
  Event event;
  event.record(Stream::current(device(0)), kSite);
  event.record(Stream::current(device(1)), kSite);
  event.block(Stream::current(device(0)), kSite);
  EXPECT_TRUE(event.done());
}

TEST(Streams, OnTheCpuAllAreEmpty) {
  EXPECT_FALSE(Stream::current(at::kCPU));
  EXPECT_FALSE(Stream::make(at::kCPU));
  Event event;
  event.record(Stream::current(device(0)), kSite);
  event.record(Stream(), kSite);
  EXPECT_TRUE(event.done());
}

}  // namespace
}  // namespace tessera::sim::stream_test
