// Messages of tensors on devices: the bits that were sent, for any order in which both ends post,
// wait and let go, and an order of streams that has no gap and is not stricter than requested.
#include "comm/p2p.h"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tessera/world.h"

namespace tessera::sim::p2p_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::P2P;
using comm::P2PTag;
using comm::Transfer;

P2PTag activations(int micro_batch, int stage = 0) {
  return {7, P2PTag::Direction::kForward, stage, micro_batch, 0};
}

std::shared_ptr<P2P> p2p_of_all(World& world) {
  return comm::p2p_of(world, comm::all_ranks(world.size()));
}

/// One of many: its values follow from its number.
struct Planned {
  int from;
  int to;
  P2PTag tag;
  int number;

  at::Tensor values() const {
    static constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kLong};
    static constexpr std::int64_t kRows[] = {3, 0, 1, 700, 64};
    const std::int64_t rows = kRows[number % 5];
    return at::arange(rows * 16)
        .remainder(101)
        .add(number % 29)
        .view({rows, 16})
        .to(kDtypes[number % 3]);
  }
};

/// Among all pairs, in both directions.
std::vector<Planned> plan(int ranks, int messages) {
  std::vector<Planned> all;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      for (int i = 0; i < messages && from != to; ++i) {
        const auto direction =
            i % 2 == 0 ? P2PTag::Direction::kForward : P2PTag::Direction::kBackward;
        all.push_back({from, to, {7, direction, from, i / 2, 0}, static_cast<int>(all.size())});
      }
    }
  }
  return all;
}

/// All ends, posted in one drawn order and waited for in another one. What was sent is overwritten,
/// and what has come is read, at once.
void exchange_in_drawn_order(World& world, unsigned seed) {
  struct End {
    Planned planned;
    at::Tensor tensor;
    std::unique_ptr<Transfer> transfer;
  };
  const auto p2p = p2p_of_all(world);
  std::mt19937 random(100 * seed + static_cast<unsigned>(world.rank()));
  std::vector<End> ends;
  for (const Planned& one : plan(world.size(), 8)) {
    if (one.from == world.rank() || one.to == world.rank()) ends.push_back({one, {}, nullptr});
  }
  std::ranges::shuffle(ends, random);
  for (End& end : ends) {
    const at::Tensor values = end.planned.values().to(world.device());
    if (end.planned.from == world.rank()) {
      end.tensor = values.mul(1);
      end.transfer = p2p->send(end.planned.to, end.planned.tag, end.tensor);
    } else {
      end.tensor = at::zeros_like(values);
      end.transfer = p2p->receive(end.planned.from, end.planned.tag, end.tensor);
    }
  }
  std::ranges::shuffle(ends, random);
  std::vector<at::Tensor> read, expected;
  for (End& end : ends) {
    if (random() % 2 == 0) end.transfer->done();
    end.transfer->wait();
    if (random() % 2 == 0) end.transfer.reset();
    if (end.planned.from == world.rank()) {
      end.tensor.fill_(55);
    } else {
      read.push_back(end.tensor.mul(1));
      expected.push_back(end.planned.values());
    }
    if (random() % 2 == 0) end.tensor.reset();
  }
  const auto found = comm::read_on_host(read, "messages");
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_same_bits(found[i], expected[i], concat("rank ", world.rank(), ", ", i));
  }
}

class DeviceMessages : public WhenDone {};

TEST_P(DeviceMessages, ReachTheReceiveThatMeansThemWithoutARace) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    for (const int ranks : {2, 3, 4}) {
      for (const std::string device : {"sim", "sim:0"}) {
        std::atomic<int> sends{0};
        std::optional<test_hooks::Set<decltype(test_hooks::buffered_messages)>> buffered;
        if (seed > 2) {
          buffered.emplace(test_hooks::buffered_messages, [&] { return ++sends % 3 != 0; });
        }
        const Where where{ranks, device, /*side=*/seed % 2 == 0};
        SCOPED_TRACE(concat(shown(where), ", seed ", seed));
        EXPECT_EQ(race_on_ranks(where, [&](World& world) { exchange_in_drawn_order(world, seed); }),
                  "");
      }
    }
  }
}

TEST_P(DeviceMessages, ReachTheReceiveThatMeansThemOverGlooToo) {
  for (unsigned seed = 11; seed <= 12; ++seed) {
    for (const int ranks : {2, 3}) {
      for (const std::string device : {"sim", "sim:0"}) {
        const Where where{ranks, device, /*side=*/seed % 2 == 0, /*late=*/false,
                          ThreadBackend::kGloo};
        SCOPED_TRACE(concat(shown(where), ", seed ", seed));
        EXPECT_EQ(race_on_ranks(where, [&](World& world) { exchange_in_drawn_order(world, seed); }),
                  "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Asked, DeviceMessages,
                         testing::Values(Done::kAtOnce, Done::kOnlyWhenWaited));

/// From rank 0 to rank 1: what was just made, which is overwritten once it is sent; the other reads
/// it into what it has just read from.
void send_and_read(World& world) {
  const auto p2p = p2p_of_all(world);
  const auto options = at::TensorOptions(world.device());
  if (world.rank() == 0) {
    const at::Tensor sent = at::ones({100}, options).mul(3);
    p2p->send(1, activations(0), sent)->wait();
    sent.fill_(5);
  } else {
    const at::Tensor into = at::zeros({100}, options);
    into.mul(2);
    p2p->receive(0, activations(0), into)->wait();
    into.mul(2);
  }
}

// Naive: timing hides it, until it does not.
void expect_each_event_needed(const Where& where, const std::string& how) {
  ASSERT_EQ(race_on_ranks(where, send_and_read), "");
  for (const EventSite site : {EventSite::kP2PPost, EventSite::kP2PEnd}) {
    for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
      const auto left_out = without(site, end);
      EXPECT_NE(race_on_ranks(where, send_and_read), "")
          << to_string(site) << (end == EventEnd::kRecord ? ", record, " : ", block, ")
          << shown(where) << how;
    }
  }
}

TEST(DeviceMessageEvents, EachThatIsLeftOutIsFound) {
  for (const std::string device : {"sim", "sim:0"}) {
    for (const bool side : {false, true}) {
      expect_each_event_needed({2, device, side}, "");
      const test_hooks::Set buffered(test_hooks::buffered_messages, [] { return true; });
      expect_each_event_needed({2, device, side}, ", buffered");
    }
    expect_each_event_needed({2, device, /*side=*/true, /*late=*/false, ThreadBackend::kGloo}, "");
  }
}

TEST(DeviceMessageEvents, AMissingWaitIsFound) {
  for (const int forgetful : {0, 1}) {
    EXPECT_NE(race_on_ranks({2, "sim", true},
                            [&](World& world) {
                              const auto p2p = p2p_of_all(world);
                              const at::Tensor x =
                                  at::ones({100}, at::TensorOptions(world.device()));
                              const auto transfer = world.rank() == 0
                                                        ? p2p->send(1, activations(0), x)
                                                        : p2p->receive(0, activations(0), x);
                              comm::barrier(world.control(), "posted");
                              if (world.rank() != forgetful) transfer->wait();
                              comm::barrier(world.control(), "launched");
                              if (world.rank() == forgetful) x.fill_(2);
                              comm::barrier(world.control(), "written");
                            }),
              "")
        << forgetful;
  }
}

// Naive: the memory is free as soon as the host holds no reference, and the message still reads it.
TEST(DeviceMessageEvents, WhoLetsGoOfAMessageIsOrderedAfterIt) {
  for (const bool buffers : {false, true}) {
    const test_hooks::Set buffered(test_hooks::buffered_messages, [&] { return buffers; });
    for (const std::string device : {"sim", "sim:0"}) {
      for (const int lets_go : {0, 1}) {
        for (const bool before : {false, true}) {
          const auto program = [&](World& world) {
            const auto p2p = p2p_of_all(world);
            const auto options = at::TensorOptions(world.device());
            at::Tensor x = at::ones({100}, options).mul(2);
            auto transfer = world.rank() == 0 ? p2p->send(1, activations(0), x)
                                              : p2p->receive(0, activations(0), x);
            comm::barrier(world.control(), "posted");
            const bool goes = world.rank() == lets_go;
            const auto let_go = [&] {
              transfer.reset();
              x.reset();
            };
            if (goes && before) let_go();
            comm::barrier(world.control(), "let go before");
            if (!goes) transfer->wait();
            comm::barrier(world.control(), "launched");
            if (goes && !before) let_go();
            // The blocks are free again: the first of them is the one that was let go of.
            for (int i = 0; i < 3; ++i) at::full({100}, 1.5, options);
            comm::barrier(world.control(), "written");
          };
          const Where where{2, device, /*side=*/true};
          const std::string what = concat(shown(where), ", rank ", lets_go, " lets go ",
                                          before ? "before" : "after", buffers ? ", buffered" : "");
          EXPECT_EQ(race_on_ranks(where, program), "") << what;
          // A buffered one is delivered when its receiver waits or asks.
          if (buffers && lets_go == 1) continue;
          const auto left_out = without(EventSite::kP2PEnd, EventEnd::kBlock);
          EXPECT_NE(race_on_ranks(where, program), "") << what;
        }
      }
    }
  }
}

// The sender's stream is held: neither host is, and the receiver continues up to its wait.
TEST(DeviceMessages, HoldUpNoHost) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto options = at::TensorOptions(world.device());
    std::optional<HeldStream> held;
    if (world.rank() == 0) held.emplace(current(0));
    const at::Tensor x = at::ones({4}, options).add(world.rank());
    const auto transfer =
        world.rank() == 0 ? p2p->send(1, activations(0), x) : p2p->receive(0, activations(0), x);
    comm::barrier(world.control(), "posted");
    EXPECT_FALSE(transfer->done());
    if (world.rank() == 1) {
      const at::Tensor other = at::ones({8}, options).mul(2);
      EXPECT_EQ(comm::read_on_host(other, "other").sum().item<float>(), 16.0F);
    }
    transfer->wait();
    comm::Event end;
    end.record(comm::Stream::current(world.device()), EventSite::kHostRead);
    EXPECT_FALSE(end.done());
    comm::barrier(world.control(), "both have seen it");
    held.reset();
    comm::barrier(world.control(), "it continues");
    EXPECT_EQ(comm::read_on_host(x, "x").sum().item<float>(), 4.0F);
    EXPECT_TRUE(transfer->done());
  });
}

TEST(DeviceMessages, OneThatDoesNotEndIsNamedInTime) {
  std::string error;
  try {
    on_ranks(
        {2, "sim"},
        [](World& world) {
          const auto p2p = p2p_of_all(world);
          std::optional<HeldStream> held;
          if (world.rank() == 0) held.emplace(current(0));
          const at::Tensor x = at::ones({4}, at::TensorOptions(world.device())).add(1);
          const auto transfer = world.rank() == 0 ? p2p->send(1, activations(3), x)
                                                  : p2p->receive(0, activations(3), x);
          transfer->wait();
          comm::barrier(world.control(), "posted");
          if (world.rank() == 1) comm::read_on_host(x, "loss");
          while (!world.aborted()) std::this_thread::yield();
        },
        std::chrono::milliseconds(100));
  } catch (const comm::LostRank& lost) {
    error = lost.what();
  }
  EXPECT_THAT(error, Says("loss: waited 0.1 s for the device, where the message of "
                          "activations of stage 0, micro-batch 3, step 7, from rank 0",
                          "has not ended"));
}

TEST(DeviceMessages, OfTensorsElsewhereAreRefused) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto p2p = p2p_of_all(world);
    for (const at::Device other : {at::Device(at::kCPU), device(1 - world.rank())}) {
      try {
        p2p->send(1 - world.rank(), activations(0), at::zeros({8}, at::TensorOptions(other)));
        ADD_FAILURE() << "taken from " << other;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), Says(concat("x.contiguous() on ", world.device())));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::sim::p2p_test
