#include "launch/peer_watch.h"

#include <bit>

#include "simulated_watch.h"
#include "support/test.h"

namespace tessera::comm::peer_watch_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// As measured with the server and all its clients on the same two cores; alone it is faster.
constexpr microseconds kRequest{100};

PeerWatch::Time at(double time) {
  return PeerWatch::Time(
      std::chrono::duration_cast<PeerWatch::Time::duration>(std::chrono::duration<double>(time)));
}

PeerWait wait_for(std::uint64_t group, std::uint64_t sequence, int peer) {
  return {group, sequence, peer, concat("#", sequence, " on group ", group)};
}

/// `counts[g]` collectives on group g + 1, the same ones on every rank.
std::vector<IssuedHashes> issued(const std::vector<std::uint64_t>& counts, std::uint64_t what = 0) {
  std::vector<IssuedHashes> all;
  for (std::size_t group = 0; group < counts.size(); ++group) {
    IssuedHashes one{group + 1, counts[group], {}};
    for (std::uint64_t back = 0; back < std::min<std::uint64_t>(counts[group], 64); ++back) {
      one.latest.push_back(1000 * (counts[group] - back) + what);
    }
    all.push_back(one);
  }
  return all;
}

void let_wait(SimulatedRank& rank, PeerWait wait, double since,
              std::vector<IssuedHashes> has_issued) {
  rank.standing.waits = 1;
  rank.standing.wait = std::move(wait);
  rank.standing.issued = std::move(has_issued);
  rank.waits_since = at(since);
}

/// All but `lost` wait in a collective that goes in rounds: in round k for the rank 2^k before.
void let_wait_in_rounds(SimulatedWatch& watch, int lost, double since) {
  const int ranks = static_cast<int>(watch.ranks.size());
  std::vector<int> done(watch.ranks.size(), 0);  // rounds
  std::vector<int> peer(watch.ranks.size(), -1);
  for (int round = 0; 1 << round < ranks; ++round) {
    const auto before = done;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      const int source = (rank + ranks - (1 << round)) % ranks;
      if (before[place] < round) continue;
      if (source != lost && before[static_cast<std::size_t>(source)] == round) {
        ++done[place];
      } else {
        peer[place] = source;
      }
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    if (rank != lost && peer[place] >= 0) {
      let_wait(watch.ranks[place], wait_for(1, 7, peer[place]), since, issued({8}));
    }
  }
}

TEST(PeerWatch, EveryRankIsWatchedByTwoOthersHoweverManyThereAre) {
  for (const int ranks : {1, 2, 3, 4, 7, 64, 1000, 4096}) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(3 * rank);
    std::map<int, int> watchers;
    for (const int rank : all) {
      for (const int watched : watched_before(all, rank)) {
        EXPECT_NE(watched, rank);
        ++watchers[watched];
      }
    }
    for (const int rank : all) EXPECT_EQ(watchers[rank], std::min(2, ranks - 1)) << ranks;
  }
  EXPECT_TRUE(watched_before({0, 2}, 1).empty());
}

// Each rank asks as much a look for any number of ranks, and all of them as much a second.
TEST(PeerWatch, WhenAllIsWellALookCostsTheSameForAnyNumberOfRanks) {
  for (const bool in_a_wait : {false, true}) {
    for (const int ranks : {4, 64, 1024, 4096}) {
      SimulatedWatch watch(ranks, kRequest);
      // All wait long for one that computes.
      for (int rank = 1; rank < ranks && in_a_wait; ++rank) {
        let_wait(watch.ranks[static_cast<std::size_t>(rank)], wait_for(1, 7, 0), 1, issued({8}));
      }
      const double time = 30;
      EXPECT_EQ(watch.run(time), std::nullopt) << ranks;
      EXPECT_LE(watch.most_requests_of_a_look(), 2 + 10 + 1) << ranks;
      EXPECT_LE(static_cast<double>(watch.store.requests()) / time, 7000) << ranks;
      EXPECT_GE(static_cast<double>(watch.looks()),
                0.8 * ranks * time / std::chrono::duration<double>(watch.poll()).count());
    }
  }
}

// A rank that is gone is named, by the first who finds it, and everyone knows within 10 s.
TEST(PeerWatch, ALostRankOf1024IsNamedWithinTenSeconds) {
  for (const int lost : {0, 1, 511, 1023}) {
    SimulatedWatch direct(1024, kRequest);
    for (int rank = 0; rank < 1024; ++rank) {
      let_wait(direct.ranks[static_cast<std::size_t>(rank)], wait_for(1, 7, lost), 20.1,
               issued({8}));
    }
    SimulatedWatch in_rounds(1024, kRequest);
    let_wait_in_rounds(in_rounds, lost, 20.1);
    for (SimulatedWatch* watch : {&direct, &in_rounds}) {
      watch->ranks[static_cast<std::size_t>(lost)].dies_at = at(20);
      const auto named = watch->run(60);
      ASSERT_TRUE(named.has_value());
      EXPECT_THAT(named->why, Says(concat("rank ", lost, " has given no sign of life")));
      EXPECT_LE(named->told_seconds, 30);
    }
  }
}

// The store ends with rank 0, which stays for so long after it has said, or read, who is lost. And
// a rank that sees only a closed connection hears the name before it blames its neighbour.
TEST(PeerWatch, AllHaveReadWhoIsLostWhileWordsAreWaitedFor) {
  for (const int ranks : {16, 1024, 4096}) {
    for (const int lost : {1, ranks / 2, ranks - 1}) {
      SimulatedWatch watch(ranks, kRequest);
      let_wait_in_rounds(watch, lost, 20.1);
      watch.ranks[static_cast<std::size_t>(lost)].dies_at = at(20);
      const auto named = watch.run(120);
      ASSERT_TRUE(named.has_value());
      const double words = std::chrono::duration<double>(WatchTimes{watch.poll()}.words()).count();
      EXPECT_GT(named->told_0_seconds, 0);
      EXPECT_LE(named->told_seconds - named->told_0_seconds, words) << ranks;
      EXPECT_LE(named->told_seconds - named->seconds, words) << ranks;
    }
  }
}

// A live rank has beaten at least once while the others count the live ranks.
TEST(WatchTimes, FollowTheIntervalThatIsUsed) {
  for (const int ranks : {2, 200, 300, 1024, 4096}) {
    const WatchTimes times{watch_poll(ranks)};
    EXPECT_GE(times.words(), 3 * times.poll) << ranks;
    EXPECT_GE(times.heartbeats(), 3 * times.poll) << ranks;
    EXPECT_GE(times.silent_after(), 6 * times.poll) << ranks;
    EXPECT_GE(times.telling(), times.words()) << ranks;
    EXPECT_GE(times.meeting(), 2 * times.words()) << ranks;
    EXPECT_GE(times.leaving(), times.telling() + 2 * times.words()) << ranks;
    // As seldom a rank as the watches look, so that all of them together ask as often.
    EXPECT_GE(times.pause(), times.poll / 12) << ranks;
  }
  for (int ranks = 2; ranks <= 4096; ++ranks) {
    const auto words = WatchTimes{watch_poll(ranks)}.words();
    const auto explaining = WatchTimes::explaining(words);
    EXPECT_GE(explaining, 2 * words) << ranks;
    EXPECT_LE(explaining, 6 * words) << ranks;
    EXPECT_TRUE(ranks > 1024 || explaining + words <= seconds(10)) << ranks;
  }
  const WatchTimes few{watch_poll(8)};
  EXPECT_EQ(few.words(), seconds(1));
  EXPECT_EQ(WatchTimes::explaining(few.words()), seconds(6));
  EXPECT_EQ(few.heartbeats(), milliseconds(1500));
  EXPECT_EQ(few.silent_after(), seconds(6));
  EXPECT_EQ(few.telling(), seconds(2));
  EXPECT_EQ(few.meeting(), seconds(3));
  EXPECT_EQ(few.leaving(), seconds(5));
  EXPECT_EQ(few.pause(), milliseconds(16));
  const WatchTimes thousand{watch_poll(1024)};
  EXPECT_LE(thousand.words() + thousand.silent_after(), seconds(10));
}

// With their host: those who watched most of them are lost, too.
TEST(PeerWatch, NeighboursThatAreLostTogetherAreNamed) {
  SimulatedWatch watch(64, kRequest);
  for (int rank = 0; rank < 64; ++rank) {
    let_wait(watch.ranks[static_cast<std::size_t>(rank)], wait_for(1, 7, 9), 5, issued({8}));
    if (rank >= 8 && rank < 16) watch.ranks[static_cast<std::size_t>(rank)].dies_at = at(5);
  }
  const auto named = watch.run(60);
  ASSERT_TRUE(named.has_value());
  // The one after them, or one that waits for rank 9, whichever looks first.
  EXPECT_THAT(named->why, Says("no sign of life for 6 s"));
  EXPECT_THAT(named->why, ::testing::AnyOf(StartsWith("rank 14, 15"), StartsWith("rank 9")));
}

TEST(PeerWatch, ASilentPeerIsLostOnlyWhileSomethingWaits) {
  SimulatedWatch watch(3, kRequest);
  watch.ranks[2].dies_at = at(3);
  EXPECT_EQ(watch.run(40), std::nullopt) << "no rank waits";
  watch.ranks[0].standing.waits = 1;  // for no rank in particular
  watch.ranks[0].waits_since = at(40);
  const auto named = watch.run(60);
  ASSERT_TRUE(named.has_value());
  EXPECT_EQ(named->by, 0);
  EXPECT_GE(named->seconds, 42);
}

TEST(PeerWatch, WhoWasStoppedItselfTakesNoOneForLost) {
  SimulatedStore store(kRequest);
  PeerWatch watch(store, {.rank = 0});
  Standing standing;
  standing.peers = {0, 1};
  standing.waits = 1;
  standing.waited = seconds(60);
  const auto no_lines = [] { return std::string(); };
  store.set(store_key::pulse(1), "1");
  EXPECT_FALSE(watch.look(at(1), 0, standing, no_lines));
  EXPECT_FALSE(watch.look(at(100), 0, standing, no_lines)) << "stopped for 99 s";
  for (int time = 101; time < 106; ++time) {
    EXPECT_FALSE(watch.look(at(time), 0, standing, no_lines));
  }
  EXPECT_TRUE(watch.look(at(106), 0, standing, no_lines));
}

// Naive: who listens again takes what was there all the time for a beat.
TEST(PeerWatch, ABeatIsAnotherPulseThanTheOneReadBefore) {
  SimulatedStore store(kRequest);
  PeerWatch watch(store, {.rank = 0});
  Standing standing;
  standing.doubtful = {5};
  const auto look_at = [&](double time) {
    EXPECT_FALSE(watch.look(at(time), 0, standing, [] { return std::string(); }));
    return watch.last_beat(5);
  };
  EXPECT_EQ(watch.last_beat(5), std::nullopt);
  store.set(store_key::pulse(5), "1");
  EXPECT_EQ(look_at(1), std::nullopt);
  EXPECT_EQ(look_at(2), std::nullopt);
  store.set(store_key::pulse(5), "2");
  EXPECT_EQ(look_at(3), at(3));
  EXPECT_EQ(look_at(4), at(3));
  EXPECT_EQ(look_at(100), std::nullopt) << "stopped for 96 s";
  store.set(store_key::pulse(5), "3");
  EXPECT_EQ(look_at(101), at(101));
  standing.doubtful.clear();
  EXPECT_EQ(look_at(102), std::nullopt);
}

// Rank 2 has not come to #11 because it waits in #10. Rank 1 has stopped, and still says that it
// waited for rank 0 then.
TEST(PeerWatch, WhoHoldsUpARankInAnotherCollectiveIsKnown) {
  SimulatedWatch watch(3, kRequest);
  let_wait(watch.ranks[1], wait_for(1, 10, 0), 2.5, issued({11}));
  let_wait(watch.ranks[2], wait_for(1, 10, 1), 2.9, issued({11}));
  let_wait(watch.ranks[0], wait_for(1, 11, 2), 3.1, issued({12}));
  watch.ranks[1].dies_at = at(3);
  EXPECT_EQ(watch.run(7), std::nullopt) << "too early to take it for lost";
  EXPECT_EQ(watch.cause(0), 1);
  EXPECT_EQ(watch.cause(2), 1);
}

// In a collective of rounds most ranks wait for one that waits itself.
TEST(PeerWatch, WhoHoldsUpACollectiveInRoundsIsKnownToAllWhoWait) {
  for (const int ranks : {2, 3, 5, 8, 13, 100, 1024}) {
    for (const int lost : {0, ranks / 2, ranks - 1}) {
      SimulatedWatch watch(ranks, kRequest);
      let_wait_in_rounds(watch, lost, 3);
      const double polls = std::chrono::duration<double>(watch.poll()).count();
      EXPECT_EQ(watch.run(5.5 + 4 * polls), std::nullopt) << "it lives, it only does not come";
      for (int rank = 0; rank < ranks; ++rank) {
        if (watch.ranks[static_cast<std::size_t>(rank)].standing.wait) {
          EXPECT_EQ(watch.cause(rank), lost) << "rank " << rank << " of " << ranks;
        }
      }
      const auto rounds = static_cast<std::uint64_t>(std::bit_width(static_cast<unsigned>(ranks)));
      EXPECT_LE(watch.most_requests_of_a_look(), 12 + 3 * rounds) << ranks;
    }
  }
}

// The entries are found by hashes; only the rank that differs is asked for its text.
TEST(PeerWatch, RanksThatIssueDifferentCollectivesAreNamedTogether) {
  for (const int ranks : {2, 8, 1000}) {
    SimulatedWatch watch(ranks, kRequest);
    const int other = ranks / 2;
    let_wait_in_rounds(watch, other, 3);
    for (auto& rank : watch.ranks) rank.lines = "g\t7\taa\tthe sum\n";
    auto& differs = watch.ranks[static_cast<std::size_t>(other)];
    let_wait(differs, wait_for(1, 7, (other + ranks - 1) % ranks), 3, issued({8}, 5));
    differs.lines = "g\t7\tbb\tsomething else\n";
    const auto named = watch.run(60);
    ASSERT_TRUE(named.has_value()) << ranks;
    EXPECT_THAT(named->why, StartsWith("ranks disagree: rank "));
    EXPECT_THAT(named->why,
                Says(concat("rank ", other, " issues something else"), "issues the sum"));
    EXPECT_LE(watch.store.texts_of_issued(), 2U);
    EXPECT_LE(named->seconds, 3 + 2 + 6 * std::chrono::duration<double>(watch.poll()).count());
  }
}

class Deadlock : public ::testing::Test {
 protected:
  /// Rank r waits in group r + 1 for the next rank, which has not issued that.
  void let_all_wait(int ranks) {
    watch_ = std::make_unique<SimulatedWatch>(ranks, kRequest);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<std::uint64_t> counts(static_cast<std::size_t>(ranks), 4);
      counts[static_cast<std::size_t>(rank)] = 5;
      let_wait(rank_of(rank), wait_for(static_cast<std::uint64_t>(rank) + 1, 4, (rank + 1) % ranks),
               2, issued(counts));
    }
  }
  SimulatedRank& rank_of(int rank) { return watch_->ranks[static_cast<std::size_t>(rank)]; }

  std::unique_ptr<SimulatedWatch> watch_;
};

TEST_F(Deadlock, OfRanksThatWaitForEachOtherInDifferentGroupsIsNamedAtOnce) {
  let_all_wait(2);
  const auto named = watch_->run(100);
  ASSERT_TRUE(named.has_value());
  EXPECT_EQ(
      named->why,
      "ranks wait for each other: rank 0 waits in #4 on group 1, which rank 1 has not issued; "
      "rank 1 waits in #4 on group 2, which rank 0 has not issued; issue collectives in the "
      "same order on every rank");
  EXPECT_LE(named->seconds, 2 + 2 + 2 + 1);
}

TEST_F(Deadlock, OfMoreRanksHasTheSameWordsOnAll) {
  let_all_wait(3);
  const auto named = watch_->run(100);
  ASSERT_TRUE(named.has_value());
  EXPECT_THAT(named->why, StartsWith("ranks wait for each other: rank 0 waits in #4 on group 1"));
  EXPECT_THAT(named->why, Says("rank 2 waits in #4 on group 3, which rank 0 has not issued"));
}

// After a recovery sequences begin again, and may look like the cycle that was there before.
TEST_F(Deadlock, IsSuspectedAgainAfterARecovery) {
  SimulatedStore store(kRequest);
  PeerWatch watch(store, {.rank = 0});
  Standing standing;
  standing.peers = {0, 1};
  standing.waits = 1;
  standing.waited = seconds(60);
  standing.wait = wait_for(1, 4, 1);
  standing.issued = issued({5, 4});
  std::uint64_t beat = 0;
  const auto look = [&](double time, int epoch) {
    const Pulse other{++beat, epoch, 1, wait_for(2, 4, 0), -1, issued({4, 5})};
    store.set(store_key::pulse(1), encode(other));
    const Pulse own{beat, epoch, 1, standing.wait, -1, standing.issued};
    store.set(store_key::pulse(0), encode(own));
    return watch.look(at(time), epoch, standing, [] { return std::string(); }).has_value();
  };
  EXPECT_FALSE(look(1, 0));
  EXPECT_FALSE(look(2, 0));
  EXPECT_FALSE(look(3.5, 1)) << "seen for the first time in this epoch";
  EXPECT_FALSE(look(5, 1));
  EXPECT_TRUE(look(6, 1));
}

TEST_F(Deadlock, IsNoneWhereSomebodyComputes) {
  let_all_wait(3);
  rank_of(1).standing.waits = 0;
  rank_of(1).standing.wait.reset();
  EXPECT_EQ(watch_->run(90), std::nullopt);
}

TEST_F(Deadlock, IsNoneWhereTheDataIsOnItsWay) {
  let_all_wait(2);
  rank_of(1).standing.issued = issued({5, 5});
  EXPECT_EQ(watch_->run(90), std::nullopt);
}

TEST_F(Deadlock, IsNoneWhereAnotherThreadMayIssueIt) {
  let_all_wait(2);
  rank_of(1).standing.waits = 2;
  EXPECT_EQ(watch_->run(90), std::nullopt);
}

/// Returns the hashes of messages on group 1: first, first + 1, ...
std::vector<IssuedHashes> posted(std::uint64_t first, std::uint64_t count) {
  IssuedHashes messages{1, count, {}, /*of_messages=*/true};
  for (std::uint64_t i = 0; i < count; ++i) messages.latest.push_back(first + i);
  return {messages};
}

/// Two ranks of which each waits for a message of the other one.
std::optional<SimulatedWatch::Named> named_of_two(std::vector<IssuedHashes> of_first,
                                                  std::vector<IssuedHashes> of_second) {
  SimulatedWatch watch(2, kRequest);
  let_wait(watch.ranks[0], wait_for(1, 0xfedcba9876543210, 1), 2, std::move(of_first));
  let_wait(watch.ranks[1], wait_for(1, 0xaaaaaaaaaaaaaaaa, 0), 2, std::move(of_second));
  return watch.run(60);
}

// Messages have no common order: their sequence is a hash, and far above any count.
TEST(MessagesBetweenRanks, ThatWaitForEachOtherAreADeadlockWhereNeitherIsUnderWay) {
  const auto named = named_of_two(posted(1, 3), posted(9, 2));
  ASSERT_TRUE(named.has_value());
  EXPECT_THAT(named->why, StartsWith("ranks wait for each other: rank 0 waits in"));
}

TEST(MessagesBetweenRanks, AreNoDeadlockWhereOneIsUnderWay) {
  EXPECT_EQ(named_of_two(posted(1, 3), posted(0xfedcba9876543210 - 1, 3)), std::nullopt);
  EXPECT_EQ(named_of_two(posted(0xaaaaaaaaaaaaaaaa, 1), posted(5, 1)), std::nullopt);
}

// A pulse has room for some of them only.
TEST(MessagesBetweenRanks, AreNoDeadlockWhereTheOneThatIsWaitedForMayBeUnderWay) {
  EXPECT_EQ(named_of_two(posted(1, 3), posted(9, 200)), std::nullopt);
}

TEST(MessagesBetweenRanks, OfDifferentTensorsAreNamed) {
  SimulatedWatch watch(2, kRequest);
  let_wait(watch.ranks[0], wait_for(1, 100, 1), 2, posted(100, 1));
  let_wait(watch.ranks[1], wait_for(1, 200, 0), 2, posted(200, 1));
  watch.ranks[0].lines = "g\t77\t100\tactivations, to rank 1 ([4] Float)\n";
  watch.ranks[1].lines = "g\t77\t200\tactivations, from rank 0 ([5] Float)\n";
  const auto named = watch.run(60);
  ASSERT_TRUE(named.has_value());
  EXPECT_EQ(named->why,
            "ranks disagree: rank 0 issues activations, to rank 1 ([4] Float) but rank 1 issues "
            "activations, from rank 0 ([5] Float) (group g)");
}

TEST(Compare, LooksAsFarBackAsBothHaveCome) {
  const auto one = [](std::uint64_t count, std::uint64_t what = 0) {
    return issued({count}, what).front();
  };
  EXPECT_EQ(compare(one(8), one(8)), Issued::kSame);
  EXPECT_EQ(compare(one(8), one(5)), Issued::kSame);
  EXPECT_EQ(compare(one(8), one(0)), Issued::kSame);
  EXPECT_EQ(compare(one(8), one(8, 1)), Issued::kDifferent);
  EXPECT_EQ(compare(one(8, 1), one(5)), Issued::kDifferent);
  EXPECT_EQ(compare(one(100), one(20)), Issued::kTooFar);
}

TEST(Pulse, ReadsAsItWasWritten) {
  Pulse pulse;
  pulse.beat = 17;
  EXPECT_EQ(encode(pulse), "17");
  pulse.epoch = 2;
  pulse.waits = 1;
  pulse.wait = wait_for(0xfedcba9876543210, 9, 3);
  pulse.cause = 5;
  pulse.issued = issued({10, 0, 2});
  const Pulse read = decode_pulse(encode(pulse));
  EXPECT_EQ(encode(read), encode(pulse));
  EXPECT_EQ(read.wait->text, pulse.wait->text);
  EXPECT_EQ(read.issued.front().latest.size(), 8U) << "the latest ones only";
  pulse.issued = posted(5, 20);
  const Pulse of_messages = decode_pulse(encode(pulse));
  EXPECT_TRUE(of_messages.issued.front().of_messages);
  EXPECT_EQ(of_messages.issued.front().count, 20U);
  EXPECT_EQ(of_messages.issued.front().latest, pulse.issued.front().latest);
}

TEST(Pulse, OfAnotherProcessIsReadAsFarAsItGoes) {
  EXPECT_EQ(decode_pulse("").beat, 0U);
  const Pulse pulse = decode_pulse("3\nwait\t0\tx\t1\t2\t3\t4\ttext\nissued\nissued\tzz\t1\n\t\n");
  EXPECT_EQ(pulse.beat, 3U);
  EXPECT_FALSE(pulse.wait.has_value());
  EXPECT_TRUE(pulse.issued.empty());
}

TEST(FindDisagreement, FirstDifferentEntryOfAnySharedGroupIsNamed) {
  const std::string mine = "g\t3\taa\tA\ng\t4\tbb\tB\nh\t0\tcc\tC\n";
  EXPECT_EQ(find_disagreement(1, mine, 0, "g\t4\txx\tX\n"),
            "ranks disagree: rank 0 issues X but rank 1 issues B (group g)");
  EXPECT_FALSE(find_disagreement(1, mine, 0, "g\t3\taa\tA\n").has_value());
  EXPECT_FALSE(find_disagreement(1, mine, 0, "g\t9\txx\tX\n").has_value());
  EXPECT_FALSE(find_disagreement(1, mine, 0, "garbage\n\t\t\t\ng\t99999999999999999999999\tx\tX\n")
                   .has_value());
}

}  // namespace
}  // namespace tessera::comm::peer_watch_test
