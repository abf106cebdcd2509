// The NCCL backend between several ranks, over a stand-in for NCCL (stand_in.h), which keeps NCCL's
// rules and finds what breaks them.
#include <ATen/ATen.h>

#include <random>

#include "comm/p2p.h"
#include "sim/drawn_collectives.h"
#include "sim/nccl/stand_in.h"
#include "sim/ranks.h"
#include "sim/simulator.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tessera/world.h"

namespace tessera::sim::nccl_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::P2PRoute;
using comm::P2PTag;

Where over_nccl(int ranks, bool side = false) {
  return {ranks, "sim", side, /*late=*/false, ThreadBackend::kNccl};
}

/// The first race on any rank, else what `body` throws first; the other ranks, whose devices wait
/// for it, continue.
std::string thrown_on(const Where& where, const std::function<void(World&)>& body,
                      const WorldOptions& options = {}) {
  WorldOptions here = options;
  here.device = where.device;
  std::string text;
  try {
    launch_threads(
        where.ranks, where.backend,
        [&](World& world) {
          try {
            body(world);
          } catch (...) {
            break_open("sim: another rank has failed");
            throw;
          }
        },
        here);
  } catch (const std::exception& error) {
    text = error.what();
  }
  settle();
  const std::vector<std::string> races = take_races();
  if (!races.empty()) text = races.front();
  take_nccl_findings();
  return text;
}

TEST(NcclGroups, HaveTheBitsOfTheCpu) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    for (const int ranks : {1, 2, 3, 4}) {
      const Where where = over_nccl(ranks, /*side=*/seed % 2 == 0);
      expect_bits_of_the_cpu(where, seed, results_of({ranks, "cpu"}, seed));
      EXPECT_THAT(take_nccl_findings(), IsEmpty());
    }
  }
}

/// Sums 1000 bf16 addends a rank, kept in fp32 (`wide`) or in the dtype that travels.
std::vector<at::Tensor> sums_of_bf16(bool wide) {
  std::vector<at::Tensor> sums(4);
  on_ranks(over_nccl(4), [&](World& world) {
    const auto group = world.group(comm::all_ranks(4), "reduce");
    const auto seed = static_cast<std::uint64_t>(world.rank());
    const at::Tensor addends = drawn(seed, {4000}, at::kBFloat16).to(world.device());
    const at::Tensor sum =
        at::empty({1000}, addends.options().dtype(wide ? at::kFloat : at::kBFloat16));
    group->issue(batch_of({comm::ReduceScatter{addends, sum, comm::Into::kOverwrite}}))->wait();
    sums[static_cast<std::size_t>(world.rank())] = comm::read_on_host(sum, "sum");
  });
  settle();
  return sums;
}

// NCCL adds in an order of its own.
TEST(NcclGroups, SumsThatAreWiderThanWhatTravelsKeepTheirBitsInAnyOrderNcclAdds) {
  const auto wide = sums_of_bf16(true), narrow = sums_of_bf16(false);
  sum_from(2);
  const auto other_wide = sums_of_bf16(true), other_narrow = sums_of_bf16(false);
  sum_from(0);
  bool differs = false;
  for (std::size_t rank = 0; rank < wide.size(); ++rank) {
    expect_same_bits(other_wide[rank], wide[rank], concat("rank ", rank));
    differs = differs || !at::equal(other_narrow[rank], narrow[rank]);
  }
  EXPECT_TRUE(differs) << "the stand-in's order shows nowhere";
}

/// Runs a collective, and a message to the next rank, of what was just made; reads the results at
/// once.
void sum_and_send(World& world) {
  const auto group = world.group(comm::all_ranks(world.size()), "reduce");
  const at::TensorOptions here(world.device());
  const at::Tensor data = at::ones({100}, here).mul(3);
  group->issue(batch_of({comm::AllReduce{data}}))->wait();
  data.mul(2);
  const auto p2p = comm::p2p_of(world, comm::all_ranks(world.size()));
  const P2PRoute route{0, 1, P2PTag::Direction::kForward};
  p2p->connect({route});
  const P2PTag tag{7, route.direction, 0, 0, 0};
  if (world.rank() == 0) {
    const at::Tensor sent = at::ones({100}, here).mul(3);
    p2p->send(1, tag, sent)->wait();
    sent.fill_(5);
  } else if (world.rank() == 1) {
    const at::Tensor into = at::zeros({100}, here);
    into.mul(2);
    p2p->receive(0, tag, into)->wait();
    into.mul(2);
  }
}

TEST(NcclEvents, EachThatIsLeftOutIsFound) {
  const Where where = over_nccl(2, /*side=*/true);
  ASSERT_EQ(race_on_ranks(where, sum_and_send), "");
  for (const EventSite site :
       {EventSite::kIssue, EventSite::kWorkEnd, EventSite::kP2PPost, EventSite::kP2PEnd}) {
    for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
      const auto left_out = without(site, end);
      const std::string race = thrown_on(where, sum_and_send);
      EXPECT_THAT(race, Says("race:"))
          << to_string(site) << (end == EventEnd::kRecord ? ", record" : ", block");
    }
  }
}

struct Planned {
  P2PRoute route;
  P2PTag tag;
  int number;
  at::Tensor values() const {
    const std::int64_t rows =
        std::vector<std::int64_t>{3, 0, 1, 700, 64}[static_cast<std::size_t>(number % 5)];
    return at::arange(rows * 16).remainder(101).add(number % 29).view({rows, 16}).to(at::kBFloat16);
  }
};

// A way keeps its order; ways cross as they like.
TEST(NcclMessages, OfManyWaysArriveInAnyOrderTheEndsTakeThem) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    const int ranks = 2 + static_cast<int>(seed) % 3;
    std::set<P2PRoute> routes;
    std::vector<Planned> all;
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        for (const auto direction : {P2PTag::Direction::kForward, P2PTag::Direction::kBackward}) {
          if (from == to) continue;
          routes.insert({from, to, direction});
          for (int i = 0; i < 5; ++i) {
            all.push_back({{from, to, direction}, {7, direction, from, i, 0}, i + 5 * from + to});
          }
        }
      }
    }
    on_ranks(over_nccl(ranks, seed % 2 == 0), [&](World& world) {
      const auto p2p = comm::p2p_of(world, comm::all_ranks(ranks));
      p2p->connect(routes);
      std::mt19937 random(10 * seed + static_cast<unsigned>(world.rank()));
      std::map<P2PRoute, std::vector<const Planned*>> of_way;
      for (const Planned& one : all) {
        if (one.route.from == world.rank() || one.route.to == world.rank()) {
          of_way[one.route].push_back(&one);
        }
      }
      struct End {
        const Planned* planned;
        at::Tensor tensor;
        std::unique_ptr<comm::Transfer> transfer;
      };
      std::vector<End> ends;
      std::map<P2PRoute, std::size_t> next;
      while (!of_way.empty()) {
        auto way = of_way.begin();
        std::advance(way, random() % of_way.size());
        const Planned& one = *way->second[next[way->first]++];
        const at::Tensor values = one.values().to(world.device());
        End end{&one, one.route.from == world.rank() ? values.mul(1) : at::zeros_like(values), {}};
        end.transfer = one.route.from == world.rank()
                           ? p2p->send(one.route.to, one.tag, end.tensor)
                           : p2p->receive(one.route.from, one.tag, end.tensor);
        ends.push_back(std::move(end));
        if (next[way->first] == way->second.size()) of_way.erase(way);
      }
      for (End& end : ends) {
        end.transfer->wait();
        if (end.planned->route.from == world.rank()) continue;
        expect_same_bits(comm::read_on_host(end.tensor, "message"), end.planned->values(),
                         concat("seed ", seed, ", rank ", world.rank()));
      }
    });
    EXPECT_THAT(take_nccl_findings(), IsEmpty());
    settle();
  }
}

TEST(NcclGroups, ComparedEntriesNameBothRanks) {
  WorldOptions options;
  options.compare_entries = true;
  const auto gathers = [](World& world, const char* unit) {
    const auto group = world.group({0, 1}, "gather");
    group
        ->issue(
            batch_of({comm::AllGather{at::zeros({8}, at::TensorOptions(world.device()))}}, unit))
        ->wait();
  };
  EXPECT_EQ(
      thrown_on(over_nccl(2), [&](World& world) { gathers(world, "layers.3"); }, options), "");
  EXPECT_THAT(
      thrown_on(
          over_nccl(2),
          [&](World& world) { gathers(world, world.rank() == 0 ? "layers.3" : "layers.4"); },
          options),
      Says("rank 0 issues all_gather of layers.3 (#0",
           "but rank 1 issues all_gather of layers.4 (#0"));
}

TEST(NcclGroups, TwoRanksOnOneDeviceAreRefused) {
  EXPECT_THAT(thrown_on({2, "sim:0", false, false, ThreadBackend::kNccl},
                        [](World& world) { world.group({0, 1}, "gather"); }),
              Says("on one device", "sim:0"));
}

TEST(NcclGroups, AreNotOpenedAgainAfterAFailure) {
  EXPECT_THAT(thrown_on(over_nccl(2), [](World& world) { world.recover(); }),
              Says("recover: found backend nccl"));
}

// The stand-in itself finds mistakes: tests in which it finds none would prove nothing otherwise.

TEST(NcclStandIn, FindsOperationsThatDiffer) {
  EXPECT_THAT(thrown_on(over_nccl(2),
                        [](World& world) {
                          const auto group = world.group({0, 1}, "gather");
                          const at::TensorOptions here(world.device());
                          const at::Tensor data = at::zeros({world.rank() == 0 ? 8 : 10}, here);
                          group->issue(batch_of({comm::AllGather{data}}))->wait();
                        }),
              AnyOf(Says("all-gather of 16", "all-gather of 20"), Says("another rank has failed")));
}

TEST(NcclStandIn, FindsWhatSomeRanksNeverLaunch) {
  on_ranks(over_nccl(2), [](World& world) {
    const auto group = world.group({0, 1}, "gather");
    if (world.rank() == 1) return;
    group->issue(batch_of({comm::AllGather{at::zeros({8}, at::TensorOptions(world.device()))}}));
  });
  EXPECT_THAT(take_nccl_findings(), Contains(Says("was launched by 1 of 2 ranks")));
  settle();
}

TEST(NcclStandIn, FindsOrdersInWhichDevicesWouldWaitForEachOther) {
  on_ranks(over_nccl(3), [](World& world) {
    // Three communicators, each of two of the ranks, in a circle.
    std::vector<std::shared_ptr<comm::Group>> mine;
    for (const auto& pair : std::vector<std::vector<int>>{{0, 1}, {1, 2}, {0, 2}}) {
      if (std::ranges::count(pair, world.rank()) > 0) mine.push_back(world.group(pair, "gather"));
    }
    if (world.rank() == 0) std::ranges::reverse(mine);
    std::vector<std::unique_ptr<comm::Work>> all;
    for (const auto& group : mine) {
      const at::Tensor data = at::zeros({8}, at::TensorOptions(world.device()));
      all.push_back(group->issue(batch_of({comm::AllGather{data}})));
    }
  });
  EXPECT_THAT(take_nccl_findings(), Contains(Says("in different orders")));
  settle();
}

}  // namespace
}  // namespace tessera::sim::nccl_test
