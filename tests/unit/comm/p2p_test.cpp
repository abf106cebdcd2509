// Messages between two ranks: each reaches the receive that matches it, in any order of posting at
// both ends; ends that differ are named; every failure ends in time and leaves no memory to be
// written.
#include "comm/p2p.h"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "base/test_hooks.h"
#include "base/trace.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::p2p_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

using Clock = std::chrono::steady_clock;

P2PTag activations(int micro_batch, std::uint64_t step = 7, int stage = 0) {
  return {step, P2PTag::Direction::kForward, stage, micro_batch, 0};
}

std::shared_ptr<P2P> p2p_of_all(World& world) { return p2p_of(world, all_ranks(world.size())); }

/// For what others are sure to do.
bool comes_true(const std::function<bool()>& what) {
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (!what()) {
    if (Clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

/// Fewer than all, so that a wait for what never comes ends.
WorldOptions short_waits(milliseconds timeout = milliseconds(300)) {
  WorldOptions options;
  options.timeout = timeout;
  return options;
}

class Messages : public testing::TestWithParam<ThreadBackend> {};

/// One of many: its tensor follows from its number.
struct Planned {
  int from;
  int to;
  P2PTag tag;
  int number;

  at::Tensor values() const {
    static constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kLong};
    static constexpr std::int64_t kRows[] = {3, 0, 1, 700, 64};
    const auto dtype = kDtypes[number % 3];
    const std::int64_t rows = kRows[number % 5];
    return at::arange(rows * 16).remainder(101).add(number % 29).view({rows, 16}).to(dtype);
  }
};

/// Among all pairs, in both directions, of two stages a rank.
std::vector<Planned> plan(int ranks, int messages, std::uint64_t step) {
  std::vector<Planned> all;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      for (int i = 0; i < messages && from != to; ++i) {
        const auto direction =
            i % 2 == 0 ? P2PTag::Direction::kForward : P2PTag::Direction::kBackward;
        const P2PTag tag{step, direction, from + ranks * (i / 2 % 2), i / 4, 0};
        all.push_back({from, to, tag, static_cast<int>(all.size())});
      }
    }
  }
  return all;
}

/// Posts all ends of a plan in one random order on every rank, and waits for them in another one.
void exchange_in_random_order(World& world, std::uint64_t first_step, std::uint64_t steps) {
  struct End {
    Planned planned;
    at::Tensor tensor;
    std::unique_ptr<Transfer> transfer;
  };
  const auto p2p = p2p_of_all(world);
  std::mt19937 random(static_cast<unsigned>(100 * world.size() + world.rank()));
  for (std::uint64_t step = first_step; step < first_step + steps; ++step) {
    std::vector<End> ends;
    for (const Planned& one : plan(world.size(), 24, step)) {
      if (one.from == world.rank()) ends.push_back({one, one.values(), nullptr});
      if (one.to == world.rank()) ends.push_back({one, at::full_like(one.values(), 55), nullptr});
    }
    std::shuffle(ends.begin(), ends.end(), random);
    for (End& end : ends) {
      const bool sends = end.planned.from == world.rank();
      end.transfer = sends ? p2p->send(end.planned.to, end.planned.tag, end.tensor)
                           : p2p->receive(end.planned.from, end.planned.tag, end.tensor);
    }
    std::shuffle(ends.begin(), ends.end(), random);
    for (End& end : ends) {
      // Asked for, asked for until it is there, or waited for at once.
      const auto way = random() % 4;
      if (way == 0) end.transfer->done();
      if (way == 1) {
        EXPECT_TRUE(comes_true([&] { return end.transfer->done(); }));
      }
      end.transfer->wait();
      EXPECT_TRUE(end.transfer->done());
      EXPECT_TRUE(end.tensor.equal(end.planned.values()))
          << to_string(end.planned.tag) << " from " << end.planned.from << " to " << end.planned.to;
    }
  }
}

TEST_P(Messages, ReachTheReceiveThatMeansThemInAnyOrderTheyArePosted) {
  for (const int ranks : {2, 3, 4}) {
    pool(GetParam(), ranks).run([](World& world) { exchange_in_random_order(world, 1000, 5); });
  }
}

TEST(InProcessMessages, ReachTheirReceivesForAnyDelaysAndWhichSendsAreBuffered) {
  const test_hooks::Set delayed(test_hooks::message_delay, [](const P2PTag& tag) {
    const auto number = tag.step * 7919 + static_cast<std::uint64_t>(tag.stage) * 31 +
                        static_cast<std::uint64_t>(tag.micro_batch) * 17 +
                        static_cast<std::uint64_t>(tag.direction);
    return microseconds(number * 2654435761 % 3000);
  });
  std::atomic<int> sends{0};
  const test_hooks::Set buffered(test_hooks::buffered_messages, [&] { return ++sends % 3 == 0; });
  for (const int ranks : {2, 3, 4}) {
    pool(ThreadBackend::kInProcess, ranks).run([](World& world) {
      exchange_in_random_order(world, 2000, 10);
    });
  }
}

TEST_P(Messages, TravelWithSeveralTensors) {
  pool(GetParam(), 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    std::vector<std::unique_ptr<Transfer>> transfers;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 6; ++i) {
      // The second rank posts them the other way round.
      const int index = world.rank() == 0 ? i : 5 - i;
      P2PTag tag = activations(0, 11);
      tag.index = index;
      tensors.push_back(at::full({4}, world.rank() == 0 ? index : -1, at::kLong));
      transfers.push_back(world.rank() == 0 ? p2p->send(1, tag, tensors.back())
                                            : p2p->receive(0, tag, tensors.back()));
    }
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      transfers[i]->wait();
      const int index = world.rank() == 0 ? static_cast<int>(i) : 5 - static_cast<int>(i);
      EXPECT_EQ(tensors[i][0].item<std::int64_t>(), index);
    }
  });
}

TEST_P(Messages, SendEndsWhenItsReceiveIsPostedAndNotBefore) {
  pool(GetParam(), 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const P2PTag tag = activations(1, 12);
    auto tensor = at::full({1000}, world.rank());
    if (world.rank() == 0) {
      const auto sent = p2p->send(1, tag, tensor);
      EXPECT_FALSE(sent->done());
      barrier(world.control(), "sent");
      EXPECT_FALSE(sent->done());
      barrier(world.control(), "asked");
      EXPECT_TRUE(comes_true([&] { return sent->done(); }));
    } else {
      barrier(world.control(), "sent");
      barrier(world.control(), "asked");
      p2p->receive(0, tag, tensor)->wait();
      EXPECT_EQ(tensor.sum().item<std::int64_t>(), 0);
    }
  });
}

// One of two sends was posted first and ends last.
TEST_P(Messages, AreDoneInTheOrderInWhichTheyEndAndNotInThatOfTheQuestions) {
  pool(GetParam(), 3).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto x = at::ones({100});
    if (world.rank() == 0) {
      const auto last = p2p->send(1, activations(1, 13), x);
      const auto first = p2p->send(2, activations(2, 13), x);
      EXPECT_FALSE(last->done());
      EXPECT_FALSE(first->done());
      barrier(world.control(), "posted");
      EXPECT_TRUE(comes_true([&] { return first->done(); }));
      EXPECT_FALSE(last->done());
      barrier(world.control(), "first has ended");
      last->wait();
    } else {
      const auto into = at::zeros({100});
      barrier(world.control(), "posted");
      if (world.rank() == 2) p2p->receive(0, activations(2, 13), into)->wait();
      barrier(world.control(), "first has ended");
      if (world.rank() == 1) p2p->receive(0, activations(1, 13), into)->wait();
      EXPECT_EQ(into.sum().item<float>(), 100.0F);
    }
  });
}

// Naive: a message for which no caller waits is destroyed while the backend still writes to it.
TEST_P(Messages, ThatNoOneWaitsForArriveAllTheSame) {
  pool(GetParam(), 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const int other = 1 - world.rank();
    const auto into = at::zeros({1 << 20});
    p2p->receive(other, activations(0, 14, other), into);
    p2p->send(other, activations(0, 14, world.rank()), at::ones({1 << 20}));
    const auto last = at::zeros({4});
    const auto receive = p2p->receive(other, activations(1, 14, other), last);
    p2p->send(other, activations(1, 14, world.rank()), at::ones({4}))->wait();
    receive->wait();
    EXPECT_EQ(last.sum().item<float>(), 4.0F);
    barrier(world.control(), "end of the test");
  });
}

TEST_P(Messages, OfAnotherShapeOrDtypeAreNamedOnBothRanks) {
  const std::pair<at::Tensor, const char*> received[] = {
      {at::zeros({8, 4}), "[8, 4] Float"},
      {at::zeros({4, 4}), "[4, 4] Float"},
      {at::zeros({4, 8}, at::kBFloat16), "[4, 8] BFloat16"}};
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  ThreadRanks ranks(2, GetParam(), options);
  for (const auto& [into, text] : received) {
    std::atomic<int> named{0};
    const std::string error = comm_error_of([&, tensor = into] {
      ranks.run([&](World& world) {
        const auto p2p = p2p_of_all(world);
        const auto transfer = world.rank() == 0 ? p2p->send(1, activations(3), at::ones({4, 8}))
                                                : p2p->receive(0, activations(3), tensor);
        try {
          transfer->wait();
        } catch (const Error&) {
          ++named;
          throw;
        }
      });
    });
    EXPECT_EQ(named, 2);
    EXPECT_THAT(error, Says("ranks disagree: rank 0 issues activations of stage 0, "
                            "micro-batch 3, step 7, to rank 1 ([4, 8] Float)",
                            "but rank 1 issues activations of stage 0, micro-batch 3, "
                            "step 7, from rank 0 (" +
                                std::string(text) + ")"));
    EXPECT_EQ(into.to(at::kFloat).sum().item<float>(), 0.0F) << "exchanged in silence";
  }
}

TEST(InProcessMessages, OfEmptyTensorsAreComparedToo) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  EXPECT_THAT(comm_error_of([&] {
                ranks.run([&](World& world) {
                  const auto p2p = p2p_of_all(world);
                  const auto transfer = world.rank() == 0
                                            ? p2p->send(1, activations(3), at::ones({0, 8}))
                                            : p2p->receive(0, activations(3), at::ones({4, 8}));
                  transfer->wait();
                });
              }),
              Says("ranks disagree", "([0, 8] Float)"));
}

/// Returns the error of rank 0, which sends another micro-batch than rank 1 wants, and waits as
/// rank 1 does.
std::string error_of_swapped(ThreadRanks& ranks) {
  return comm_error_of([&] {
    ranks.run([&](World& world) {
      const auto p2p = p2p_of_all(world);
      const auto x = at::zeros({4});
      const auto transfer = world.rank() == 0 ? p2p->send(1, activations(2), at::ones({4}))
                                              : p2p->receive(0, activations(3), x);
      transfer->wait();
    });
  });
}

TEST(GlooMessages, ThatAreSwappedAreNamedWhileBothEndsWait) {
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  ThreadRanks ranks(2, ThreadBackend::kGloo, options);
  EXPECT_THAT(error_of_swapped(ranks),
              Says("ranks wait for each other: rank 0 waits in activations of stage 0, "
                   "micro-batch 2, step 7, to rank 1",
                   "which rank 1 has not issued; rank 1 waits in activations of stage "
                   "0, micro-batch 3, step 7, from rank 0"));
}

TEST(InProcessMessages, ThatAreSwappedAreNamedByTheWaitThatEnds) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess, short_waits());
  EXPECT_THAT(error_of_swapped(ranks),
              AnyOf(Says("micro-batch 3, step 7, from rank 0 ([4] Float): waited 0.3 s",
                         "it has posted activations of stage 0, micro-batch 2"),
                    Says("micro-batch 2, step 7, to rank 1 ([4] Float): waited 0.3 s",
                         "it has posted activations of stage 0, micro-batch 3")));
}

TEST_P(Messages, ThatNeverComeAreNamedAfterTheTimeout) {
  for (const bool sends : {true, false}) {
    ThreadRanks ranks(2, GetParam(), short_waits());
    EXPECT_THAT(comm_error_of([&] {
                  ranks.run([&](World& world) {
                    const auto p2p = p2p_of_all(world);
                    if (world.rank() == 1) return;
                    const auto x = at::zeros({2, 2});
                    const P2PTag tag{7, P2PTag::Direction::kBackward, sends ? 0 : 1, 3, 0};
                    (sends ? p2p->send(1, tag, x) : p2p->receive(1, tag, x))->wait();
                  });
                }),
                Says(sends ? "gradients of stage 0, micro-batch 3, step 7, to rank 1"
                           : "gradients of stage 1, micro-batch 3, step 7, from rank 1",
                     "([2, 2] Float): waited 0.3 s for rank 1; it is stalled"));
  }
}

TEST_P(Messages, WaitsEndWhenTheOtherRankThrowsAndNameItsErrorAndTheMessage) {
  for (const bool asks : {false, true}) {
    std::string freed;
    std::atomic<bool> posted{false};
    try {
      pool(GetParam(), 3).run([&](World& world) {
        const auto p2p = p2p_of_all(world);
        if (world.rank() == 2) return;
        if (world.rank() == 1) {
          EXPECT_TRUE(comes_true([&] { return posted.load(); }));
          throw std::runtime_error("out of ideas");
        }
        const auto x = at::zeros({4});
        const auto transfer = p2p->receive(1, activations(3, 20, 1), x);
        posted = true;
        try {
          if (asks) {
            comes_true([&] { return transfer->done(); });
          } else {
            transfer->wait();
          }
        } catch (const Error& error) {
          freed = error.what();
          throw;
        }
      });
    } catch (const std::exception& error) {
      EXPECT_STREQ(error.what(), "out of ideas");
    }
    EXPECT_THAT(freed, Says("activations of stage 1, micro-batch 3, step 20", "from rank 1",
                            "rank 1: out of ideas"));
  }
}

TEST_P(Messages, WorkAgainAfterARecoveryAndLeaveTheMemoryOfTheOldOnesAlone) {
  std::atomic<std::uint64_t> posted{0};
  pool(GetParam(), 2).run([&](World& world) {
    const auto p2p = p2p_of_all(world);
    const int other = 1 - world.rank();
    constexpr std::int64_t kMany = 4 << 20;
    for (std::uint64_t attempt = 0; attempt < 5; ++attempt) {
      // One that is perhaps half through, one that never comes, and one that somebody asks for.
      const auto half = at::zeros({kMany});
      const auto never = at::zeros({4});
      std::vector<std::unique_ptr<Transfer>> old;
      old.push_back(p2p->receive(other, activations(1, 30, other), never));
      old.push_back(p2p->receive(other, activations(0, 30, other), half));
      old.push_back(p2p->send(other, activations(0, 30, world.rank()), at::ones({kMany})));
      if (attempt % 2 == 0) old.front()->done();
      ++posted;
      EXPECT_TRUE(comes_true([&] { return posted >= 2 * (attempt + 1); }));
      if (world.rank() == 0) {
        world.abort("a bad step");
        EXPECT_THAT(comm_error_of([&] { p2p->send(1, activations(9, 30), never); }),
                    Says("a bad step"));
      }
      EXPECT_THAT(comm_error_of([&] { old.front()->wait(); }), Says("a bad step"));
      world.recover();
      half.fill_(7);
      never.fill_(7);

      const auto into = at::zeros({4});
      const auto receive = p2p->receive(other, activations(1, 30, other), into);
      const auto send = p2p->send(other, activations(1, 30, world.rank()),
                                  at::full({4}, 1 + world.rank(), at::kFloat));
      receive->wait();
      send->wait();
      EXPECT_EQ(into.sum().item<float>(), 4.0F * (1.0F + static_cast<float>(other)));
      EXPECT_THAT(comm_error_of([&] { old.front()->wait(); }),
                  AnyOf(Says("a bad step"), Says("lost when the World was recovered")));
      EXPECT_THROW(old.front()->done(), Error);
      barrier(world.control(), "sent");
      EXPECT_TRUE(half.equal(at::full({kMany}, 7.0F)));
      EXPECT_TRUE(never.equal(at::full({4}, 7.0F)));
    }
  });
}

TEST_P(Messages, OfARunThatHasFailedAreForgottenByTheNextOne) {
  ThreadRanks& ranks = pool(GetParam(), 2);
  std::unique_ptr<Transfer> left;
  std::atomic<bool> posted{false};
  const auto into = at::full({4}, 7.0F);
  EXPECT_THROW(ranks.run([&](World& world) {
    const auto p2p = p2p_of_all(world);
    if (world.rank() == 1) {
      EXPECT_TRUE(comes_true([&] { return posted.load(); }));
      throw std::runtime_error("gone");
    }
    left = p2p->receive(1, activations(0, 40, 1), into);
    posted = true;
    left->wait();
  }),
               std::runtime_error);
  ranks.run([&](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto x = world.rank() == 1 ? at::ones({4}) : at::zeros({4});
    const auto transfer = world.rank() == 1 ? p2p->send(0, activations(0, 40, 1), x)
                                            : p2p->receive(1, activations(0, 40, 1), x);
    transfer->wait();
    EXPECT_EQ(x.sum().item<float>(), 4.0F);
    if (world.rank() == 0) {
      EXPECT_THROW(left->wait(), Error);
    }
  });
  EXPECT_EQ(into.sum().item<float>(), 28.0F);
}

TEST_P(Messages, ThatCannotBePostedAreRefused) {
  pool(GetParam(), 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    EXPECT_EQ(p2p->rank(), world.rank());
    EXPECT_EQ(p2p->size(), 2);
    const auto x = at::zeros({2, 3});
    for (const int peer : {-1, 2, world.rank()}) {
      EXPECT_THROW(p2p->send(peer, activations(0, 50), x), Error);
      EXPECT_THROW(p2p->receive(peer, activations(0, 50), x), Error);
    }
    const int other = 1 - world.rank();
    EXPECT_THROW(p2p->send(other, activations(0, 50), x.t()), Error);
    EXPECT_THROW(p2p->send(other, activations(0, 50), at::Tensor()), Error);
    // Posted twice: both would go to whichever receive comes first.
    if (world.rank() == 0) {
      const auto first = p2p->send(1, activations(0, 50), x);
      EXPECT_THROW(p2p->send(1, activations(0, 50), x), Error);
      barrier(world.control(), "posted");
      first->wait();
    } else {
      barrier(world.control(), "posted");
      p2p->receive(0, activations(0, 50), at::zeros({2, 3}))->wait();
    }
    barrier(world.control(), "end of the test");
  });
}

TEST_P(Messages, GroupOfMessagesHasNoCollectives) {
  EXPECT_THROW(launch_threads(2, GetParam(),
                              [](World& world) {
                                p2p_of_all(world);
                                barrier(*world.group(all_ranks(world.size()), "messages"), "no");
                              }),
               Error);
}

TEST_P(Messages, StandInTheTraceAtBothEnds) {
  pool(GetParam(), 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto trace = std::make_shared<Trace>();
    {
      const TraceHere here(trace);
      const bool sends = world.rank() == 0;
      const auto x = at::zeros({4});
      const auto forward = sends ? p2p->send(1, {60, P2PTag::Direction::kForward, 2, 5, 0}, x)
                                 : p2p->receive(0, {60, P2PTag::Direction::kForward, 2, 5, 0}, x);
      const auto y = at::zeros({4});
      const auto backward = sends ? p2p->receive(1, {60, P2PTag::Direction::kBackward, 3, 5, 0}, y)
                                  : p2p->send(0, {60, P2PTag::Direction::kBackward, 3, 5, 0}, y);
      forward->wait();
      EXPECT_TRUE(comes_true([&] { return backward->done(); }));
      backward->wait();
    }
    std::multiset<std::string> names;
    for (const TraceSpan& span : trace->take()) {
      if (span.row == TraceRow::kMessages) names.insert(span.name);
      EXPECT_LE(span.begin, span.end);
    }
    const std::multiset<std::string> expected =
        world.rank() == 0 ? std::multiset<std::string>{"2SEND_F5", "2RECV_B5"}
                          : std::multiset<std::string>{"3RECV_F5", "3SEND_B5"};
    EXPECT_EQ(names, expected);
  });
}

TEST(InProcessMessages, ThatAreBufferedEndBeforeTheirReceives) {
  const test_hooks::Set buffered(test_hooks::buffered_messages, [] { return true; });
  pool(ThreadBackend::kInProcess, 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto x = at::ones({4});
    if (world.rank() == 0) {
      p2p->send(1, activations(0, 70), x)->wait();
      x.fill_(9);  // it has left
    }
    barrier(world.control(), "sent");
    if (world.rank() == 1) {
      x.fill_(0);
      p2p->receive(0, activations(0, 70), x)->wait();
      EXPECT_EQ(x.sum().item<float>(), 4.0F);
    }
  });
}

TEST(InProcessMessages, ThatAreDelayedArriveLaterAndOvertakeEachOther) {
  // The earlier micro-batch is longer on its way.
  const test_hooks::Set delayed(test_hooks::message_delay, [](const P2PTag& tag) {
    return microseconds(tag.micro_batch == 0 ? 60000 : 500);
  });
  pool(ThreadBackend::kInProcess, 2).run([](World& world) {
    const auto p2p = p2p_of_all(world);
    const auto begin = Clock::now();
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int i = 0; i < 2; ++i) {
      tensors.push_back(at::full({4}, world.rank() == 0 ? 1.0F : 0.0F));
      transfers.push_back(world.rank() == 0 ? p2p->send(1, activations(i, 71), tensors.back())
                                            : p2p->receive(0, activations(i, 71), tensors.back()));
    }
    transfers[1]->wait();
    EXPECT_EQ(tensors[1].sum().item<float>(), 4.0F);
    const bool early = transfers[0]->done();
    EXPECT_TRUE(!early || Clock::now() - begin >= milliseconds(60));
    transfers[0]->wait();
    EXPECT_GE(Clock::now() - begin, milliseconds(60));
    EXPECT_EQ(tensors[0].sum().item<float>(), 4.0F);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Messages,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& one) { return name_of(one.param); });

TEST(P2PTag, SaysWhatItIsOf) {
  EXPECT_EQ(to_string(activations(3, 7, 1)), "activations of stage 1, micro-batch 3, step 7");
  EXPECT_EQ(to_string(P2PTag{8, P2PTag::Direction::kBackward, 2, 0, 1}),
            "gradients of stage 2, micro-batch 0, step 8, tensor 1");
}

// Naive: a few bits of stage and micro-batch, past which a hash of 20 bits tells two apart, or does
// not. The hash is the worst: the same for all.
TEST(P2PTag, NoTwoOfAStepHaveOneNumberForAnyHashes) {
  std::mt19937 random(5);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(end));
  };
  for (int i = 0; i < 400; ++i) {
    P2PExtent extent;
    extent.stages = 1 + below(i % 2 == 0 ? 4096 : 8);
    extent.micro_batches =
        1 + below(std::min<std::int64_t>(65536, P2PExtent::kMostCells / extent.stages));
    const std::uint64_t fingerprint = random();
    std::map<int, P2PTag> numbers;
    for (int k = 0; k < 200; ++k) {
      // Some of them far apart, some next to each other.
      const P2PTag tag{3, static_cast<P2PTag::Direction>(below(2)), below(extent.stages),
                       below(k < 100 ? extent.micro_batches : std::min(extent.micro_batches, 4)),
                       below(P2PExtent::kTensors)};
      const int number = message_number(tag, extent, fingerprint);
      EXPECT_GE(number, 0);
      const auto [same, is_new] = numbers.emplace(number, tag);
      EXPECT_EQ(same->second, tag) << extent.stages << " " << extent.micro_batches;
      EXPECT_NE(number, message_number(tag, extent, fingerprint ^ 0x80)) << "8 bits of the hash";
    }
  }
}

TEST(WorldOfOne, HasNoOneToSendTo) {
  const auto world = World::of_one();
  EXPECT_THROW(p2p_of(*world, {0}), Error);
}

}  // namespace
}  // namespace tessera::comm::p2p_test
