// Groups of tensors on devices: the bits of the CPU, and an order of streams that has no gap and is
// not stricter than requested.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/queue.h"
#include "sim/drawn_collectives.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tessera/group.h"
#include "tessera/world.h"

namespace tessera::sim::collectives_test {
namespace {

using comm::Batch;
using comm::EventEnd;
using comm::EventSite;
using comm::Op;
using comm::Stream;

class DeviceGroups : public WhenDone {};

TEST_P(DeviceGroups, HaveTheBitsOfTheCpuWithoutARace) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto expected = results_of({ranks, "cpu"}, seed);
      for (const std::string device : {"sim", "sim:0"}) {
        expect_bits_of_the_cpu({ranks, device, /*side=*/seed % 2 == 0, /*late=*/seed > 2}, seed,
                               expected);
      }
    }
  }
}

TEST_P(DeviceGroups, HaveTheBitsOfTheCpuOverGlooToo) {
  for (std::uint64_t seed = 11; seed <= 13; ++seed) {
    for (const int ranks : {2, 3}) {
      const auto expected = results_of({ranks, "cpu"}, seed);
      for (const std::string device : {"sim", "sim:0"}) {
        expect_bits_of_the_cpu(
            {ranks, device, /*side=*/seed % 2 == 0, /*late=*/false, ThreadBackend::kGloo}, seed,
            expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Asked, DeviceGroups,
                         testing::Values(Done::kAtOnce, Done::kOnlyWhenWaited));

/// A sum of what was just made, of which the result is read at once.
void sum_and_read(World& world) {
  const auto group = world.group(comm::all_ranks(world.size()), "reduce");
  const at::Tensor data = at::ones({100}, at::TensorOptions(world.device())).mul(3);
  const auto work = group->issue(batch_of({comm::AllReduce{data}}));
  work->wait();
  data.mul(2);
}

std::vector<Where> places_on_side_streams() {
  std::vector<Where> places;
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    for (const std::string device : {"sim", "sim:0"}) {
      places.push_back({2, device, /*side=*/true, /*late=*/false, backend});
    }
  }
  return places;
}

// Naive: timing hides it, until it does not.
TEST(DeviceGroupEvents, EachThatIsLeftOutIsFound) {
  for (const Where& where : places_on_side_streams()) {
    ASSERT_EQ(race_on_ranks(where, sum_and_read), "");
    const bool in_process = where.backend == ThreadBackend::kInProcess;
    for (const EventSite site : {EventSite::kIssue, EventSite::kWorkEnd, EventSite::kPeers}) {
      // A copy between two devices orders their streams by itself, and Gloo's go over the host.
      if (site == EventSite::kPeers && !(in_process && where.device == "sim:0")) continue;
      for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
        const auto left_out = without(site, end);
        EXPECT_NE(race_on_ranks(where, sum_and_read), "")
            << to_string(site) << (end == EventEnd::kRecord ? ", record, " : ", block, ")
            << shown(where);
      }
    }
  }
}

using DeviceGroupDeathTest = testing::Test;

// The host reads what is sent over Gloo, and the kernel finds that the page is unreadable.
TEST(DeviceGroupDeathTest, AnEarlyReadByGlooIsFound) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // Either rank may end, or both, on threads of Gloo as well: the first one names the error.
  const auto name_error = [] {
    try {
      if (std::current_exception()) throw;
    } catch (const std::exception& error) {
      std::fputs(error.what(), stderr);
    }
    std::abort();
  };
  const auto run = [&] {
    std::set_terminate(name_error);
    const auto left_out = without(EventSite::kHostRead, EventEnd::kRecord);
    try {
      on_ranks({2, "sim", /*side=*/false, /*late=*/false, ThreadBackend::kGloo}, [](World& world) {
        const auto group = world.group(comm::all_ranks(2), "reduce");
        const at::Tensor data = at::ones({5000}, at::TensorOptions(world.device())).mul(3);
        group->issue(batch_of({comm::AllReduce{data}}))->wait();
      });
    } catch (const std::exception&) {
      name_error();
    }
  };
  EXPECT_EXIT(run(), testing::KilledBySignal(SIGABRT), "Bad address");
}

TEST(DeviceGroupEvents, AMissingWaitIsFound) {
  EXPECT_THAT(race_on_ranks({2, "sim", true},
                            [](World& world) {
                              const auto group = world.group(comm::all_ranks(2), "reduce");
                              const at::Tensor data =
                                  at::ones({100}, at::TensorOptions(world.device()));
                              const auto work = group->issue(batch_of({comm::AllReduce{data}}));
                              comm::barrier(world.control(), "issued");
                              data.mul(2);
                            }),
              Says("mul"));
}

// The compute of a rank continues while its group works: only wait() orders it after the
// collective.
TEST(DeviceGroupEvents, IssuingHoldsUpNeitherHostNorStream) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto group = world.group(comm::all_ranks(2), "reduce");
    const at::Tensor data = at::ones({100}, at::TensorOptions(world.device()));
    const HeldStream held(group->stream().get());
    const auto work = group->issue(batch_of({comm::AllReduce{data}}));
    comm::barrier(world.control(), "issued");
    const at::Tensor other = at::ones({8}, at::TensorOptions(world.device())).mul(2);
    EXPECT_EQ(comm::read_on_host(other, "other").sum().item<float>(), 16.0F);
    work->wait();
    comm::Event end;
    end.record(Stream::current(world.device()), EventSite::kHostRead);
    EXPECT_FALSE(end.done());
    comm::barrier(world.control(), "both have seen it");
  });
}

TEST(DeviceGroupEvents, WhoLetsGoOfACollectiveIsOrderedAfterIt) {
  EXPECT_EQ(race_on_ranks({2, "sim", true},
                          [](World& world) {
                            const auto group = world.group(comm::all_ranks(2), "reduce");
                            at::Tensor data = at::ones({100}, at::TensorOptions(world.device()));
                            auto work = group->issue(batch_of({comm::AllReduce{data}}));
                            comm::barrier(world.control(), "issued");
                            work.reset();
                            data.fill_(2);
                          }),
            "");
}

// Naive: the memory is free once the last rank has come and the host holds no reference, and the
// collective still reads it.
TEST(DeviceGroupEvents, MemoryOfWhoLetsGoBeforeAllHaveComeIsFreeBehindIt) {
  for (const std::string device : {"sim", "sim:0"}) {
    for (const bool late : {false, true}) {
      const auto program = [](World& world) {
        const auto group = world.group(comm::all_ranks(2), "reduce");
        const auto options = at::TensorOptions(world.device());
        at::Tensor data = at::ones({100}, options).mul(2);
        const auto issue = [&] { return group->issue(batch_of({comm::AllReduce{data}})); };
        if (world.rank() == 0) {
          issue().reset();
          data.reset();
        }
        comm::barrier(world.control(), "rank 0 has let go");
        if (world.rank() == 1) issue()->wait();
        comm::barrier(world.control(), "all have come");
        // The block is the first to be taken again.
        for (int i = 0; i < 3; ++i) at::full({100}, 1.5, options);
        comm::barrier(world.control(), "written");
      };
      const Where where{2, device, /*side=*/true, late};
      EXPECT_EQ(race_on_ranks(where, program), "") << shown(where);
      const auto left_out = without(EventSite::kWorkEnd, EventEnd::kBlock);
      EXPECT_NE(race_on_ranks(where, program), "") << shown(where);
    }
  }
}

TEST(DeviceGroups, OfTheSameRanksShareAStreamAndMessagesHaveNone) {
  on_ranks({4, "sim"}, [](World& world) {
    const auto everyone = comm::all_ranks(4);
    const Stream& stream = world.group(everyone, "gather")->stream();
    EXPECT_TRUE(stream);
    EXPECT_EQ(stream.device(), world.device());
    EXPECT_EQ(world.group(everyone, "reduce")->stream(), stream);
    EXPECT_NE(stream, Stream::current(world.device()));
    const int first = world.rank() / 2 * 2;
    EXPECT_NE(world.group({first, first + 1}, "gather")->stream(), stream);
    EXPECT_FALSE(world.group({world.rank()}, "gather")->stream()) << "no rank to wait for";
    for (const char* purpose : {"data", "stages", "control", "shard control"}) {
      EXPECT_FALSE(world.group(everyone, purpose)->stream()) << purpose;
    }
  });
}

TEST(DeviceGroups, TheQueueIssuesOnTheSubmittingThread) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto group = world.group(comm::all_ranks(2), "gather");
    const at::Tensor buffer = at::zeros({8}, at::TensorOptions(world.device()));
    std::thread::id thread;
    Stream stream;
    auto pending = world.queue().submit(*group, batch_of({comm::AllGather{buffer}}), [&] {
      thread = std::this_thread::get_id();
      stream = Stream::current(world.device());
      buffer.narrow(0, 4 * world.rank(), 4).fill_(world.rank() + 1);
    });
    EXPECT_EQ(thread, std::this_thread::get_id());
    EXPECT_EQ(stream, group->stream()) << "what goes out is filled there";
    pending.wait();
    const at::Tensor read = comm::read_on_host(buffer, "buffer");
    EXPECT_EQ(read.sum().item<float>(), 12.0F);
  });
}

// Naive: a group counts what it issues, and the host's waits are a list, which two threads corrupt.
TEST(DeviceGroups, TwoThreadsOfARankSubmitOneAfterTheOther) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto group = world.group(comm::all_ranks(2), "reduce");
    // All alike: whichever comes first, the ranks agree.
    const auto submit_many = [&] {
      const RankScope rank(world.rank());
      std::vector<at::Tensor> sums;
      for (int i = 0; i < 50; ++i) {
        const at::Tensor data = at::ones({8}, at::TensorOptions(world.device()));
        world.queue().submit(*group, batch_of({comm::AllReduce{data}})).wait();
        sums.push_back(comm::read_on_host(data, "sum"));
      }
      for (const at::Tensor& sum : sums) EXPECT_EQ(sum.sum().item<float>(), 16.0F);
    };
    std::thread second([&] {
      world.attach_thread();
      submit_many();
    });
    submit_many();
    second.join();
  });
}

// Naive: the error is kept for the wait, and a rank that submits before that hears of a lost rank.
TEST(DeviceGroups, MemoryThatRunsOutAsOneIsIssuedIsSaidAsThatAndAtOnce) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto group = world.group(comm::all_ranks(2), "gather");
    const at::TensorOptions options(world.device());
    const auto gather = [&](const std::function<void()>& ready) {
      return world.queue().submit(*group, batch_of({comm::AllGather{at::zeros({8}, options)}}),
                                  ready);
    };
    EXPECT_THROW(gather([&] {
                   const CapacityScope full(
                       world.device().index(),
                       static_cast<std::size_t>(live_bytes(world.device().index())));
                   at::empty({1024}, options);
                 }),
                 c10::OutOfMemoryError);
    EXPECT_THROW(gather({}), comm::LostRank) << "which would meet another one of the others";
    world.queue().recover();
    gather({}).wait();
  });
}

TEST(DeviceGroups, TensorsOfAnotherDeviceAreRefused) {
  on_ranks({2, "sim"}, [](World& world) {
    const auto group = world.group(comm::all_ranks(2), "gather");
    for (const at::Device other : {at::Device(at::kCPU), device(1 - world.rank())}) {
      try {
        group->issue(batch_of({comm::AllGather{at::zeros({8}, at::TensorOptions(other))}}));
        ADD_FAILURE() << "taken from " << other;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(),
                    Says(concat("found a tensor on ", other, ", expected ", world.device())));
      }
    }
  });
}

// Nothing on the host stands still for a collective: the read that follows says which it is.
TEST(DeviceGroups, ACollectiveThatDoesNotEndIsNamedInTime) {
  std::string error;
  try {
    on_ranks(
        {2, "sim"},
        [](World& world) {
          const auto group = world.group(comm::all_ranks(2), "reduce");
          const auto options = at::TensorOptions(world.device());
          const auto sum = [&](const std::string& unit) {
            const at::Tensor data = at::ones({4}, options);
            group->issue(batch_of({comm::AllReduce{data}}, unit))->wait();
            return data;
          };
          comm::read_on_host(sum("layers.0"), "first");
          const HeldStream held(group->stream().get());
          const at::Tensor stalled = sum("layers.1");
          const at::Tensor later = sum("layers.2");
          comm::barrier(world.control(), "both are held");
          comm::read_on_host(later, "loss");
        },
        std::chrono::milliseconds(100));
  } catch (const comm::LostRank& lost) {
    error = lost.what();
  }
  EXPECT_THAT(error, Says("loss: waited 0.1 s for the device, where all_reduce of layers.1",
                          "on group reduce of ranks 0,1 has not ended"));
}

TEST(DeviceGroups, UsersHaveTheirsOnTheDevice) {
  for (const std::string device : {"sim", "sim:0"}) {
    on_ranks({3, device, /*side=*/true}, [](World& world) {
      const Group group = world.group();
      const auto options = at::TensorOptions(at::kFloat).device(world.device());
      const at::Tensor mine = at::full({5}, world.rank() + 1, options).mul(2);
      group.all_reduce(mine, ReduceOp::kSum, "sums");
      EXPECT_EQ(comm::read_on_host(mine, "sums").sum().item<float>(), 60.0F);
      const at::Tensor halves = at::full({5}, world.rank() + 1, options.dtype(at::kBFloat16));
      group.all_reduce(halves, ReduceOp::kMax, "largest");
      EXPECT_EQ(comm::read_on_host(halves, "largest").sum().item<float>(), 15.0F);
      EXPECT_EQ(group.mean(world.rank(), "mean"), 1.0);
      const at::Tensor from_last = at::full({2}, world.rank(), options);
      group.broadcast(from_last, 2, "from the last");
      EXPECT_EQ(comm::read_on_host(from_last, "from the last").sum().item<float>(), 4.0F);
      group.barrier("end");
    });
  }
}

}  // namespace
}  // namespace tessera::sim::collectives_test
