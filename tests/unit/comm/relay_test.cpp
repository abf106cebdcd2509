#include "comm/ops/relay.h"

#include <numeric>

#include "support/test.h"

namespace tessera::comm::relay_test {
namespace {

// All up to 70, and large ones on both sides of powers of two.
std::vector<int> sizes() {
  std::vector<int> all(70);
  std::iota(all.begin(), all.end(), 1);
  all.insert(all.end(), {127, 128, 129, 1000, 1023, 1024, 4095, 4096});
  return all;
}

TEST(Relay, HasAsManyRoundsAsTheLogarithmRoundedUp) {
  for (const int ranks : sizes()) {
    EXPECT_GE(1 << relay::rounds(ranks), ranks);
    EXPECT_TRUE(ranks == 1 || 1 << (relay::rounds(ranks) - 1) < ranks);
  }
  EXPECT_EQ(relay::rounds(1), 0);
  EXPECT_EQ(relay::rounds(4096), 12);
}

TEST(Relay, WhomOneSendsToReceivesFromIt) {
  for (const int ranks : sizes()) {
    for (int round = 0; round < relay::rounds(ranks); ++round) {
      for (const int rank : {0, ranks / 3, ranks - 1}) {
        const auto [to, from] = relay::round_of(round, rank, ranks);
        EXPECT_EQ(relay::round_of(round, to, ranks).from, rank);
        EXPECT_EQ(relay::round_of(round, from, ranks).to, rank);
        EXPECT_NE(to, rank);
      }
    }
  }
}

TEST(Relay, HasAtMostTwoPartnersARound) {
  for (const int ranks : sizes()) {
    for (const int rank : {0, ranks / 3, ranks - 1}) {
      const auto partners = relay::partners(rank, ranks);
      EXPECT_LE(partners.size(), 2U * static_cast<unsigned>(relay::rounds(ranks)));
      EXPECT_LT(partners.size(), static_cast<std::size_t>(ranks));
      for (const int partner : partners) {
        const auto theirs = relay::partners(partner, ranks);
        EXPECT_TRUE(std::binary_search(theirs.begin(), theirs.end(), rank)) << "either way";
      }
    }
  }
}

// Each rank contributes a different digit: one that is added twice or left out shows.
TEST(Relay, SumsCountEveryRankOnce) {
  for (int ranks = 1; ranks <= 62; ++ranks) {
    using Rows = std::vector<std::int64_t>;  // [2, 1]
    std::vector<Rows> values;
    for (int rank = 0; rank < ranks; ++rank) values.push_back({std::int64_t{1} << rank, 0});
    for (int round = 0; round < relay::rounds(ranks); ++round) {
      auto next = values;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        next[at] = values[static_cast<std::size_t>(relay::round_of(round, rank, ranks).from)];
        relay::add_round(round, ranks, 1, values[at].data(), next[at].data());
      }
      values = next;
    }
    for (const Rows& rows : values) {
      EXPECT_EQ(rows[static_cast<std::size_t>(relay::row_of_sum(ranks))],
                (std::int64_t{1} << ranks) - 1)
          << ranks << " ranks";
    }
  }
}

// No rank waits in a wave for one that waits in another: both meet in the wave of the same number.
TEST(Relay, WavesHoldEveryOtherRankOnceAndAreTheSameFromBothSides) {
  for (const int ranks : sizes()) {
    for (const int most : {2, 3, 32}) {
      const auto wave_of = [&](int rank, int other) {
        const auto waves = relay::waves(rank, ranks, most);
        return std::find_if(waves.begin(), waves.end(),
                            [&](const auto& wave) {
                              return std::find(wave.begin(), wave.end(), other) != wave.end();
                            }) -
               waves.begin();
      };
      const int rank = ranks / 3;
      std::vector<int> all;
      for (const auto& wave : relay::waves(rank, ranks, most)) {
        EXPECT_LE(wave.size(), static_cast<std::size_t>(most));
        all.insert(all.end(), wave.begin(), wave.end());
      }
      std::sort(all.begin(), all.end());
      std::vector<int> others(static_cast<std::size_t>(ranks));
      std::iota(others.begin(), others.end(), 0);
      others.erase(others.begin() + rank);
      EXPECT_EQ(all, others);
      if (ranks == 1) continue;
      for (const int other : {(rank + 1) % ranks, (rank + ranks / 2) % ranks, ranks - 1}) {
        if (other == rank) continue;
        EXPECT_EQ(wave_of(rank, other), wave_of(other, rank)) << ranks;
      }
    }
  }
}

// The result of combining on the way covers every rank; so far each has the ranks of one range of
// the ring before it.
TEST(Relay, ReachesEveryRankFromEveryOther) {
  for (const int ranks : sizes()) {
    int reach = 1;  // ranks whose bits one has: itself and those before it
    for (int round = 0; round < relay::rounds(ranks); ++round) {
      const int step = 1 << round;
      EXPECT_LE(step, reach) << "no gap between its own range and the one that comes";
      reach = std::max(reach, step + reach);
    }
    EXPECT_GE(reach, ranks);
  }
}

// The gather itself, with parts for words: every part arrives once, in its place.
TEST(Relay, GathersEveryPartOnceInItsPlace) {
  for (const int ranks : sizes()) {
    if (ranks > 129) continue;
    const auto count = static_cast<std::size_t>(ranks);
    std::vector<std::vector<int>> kept(count);
    for (int rank = 0; rank < ranks; ++rank) kept[static_cast<std::size_t>(rank)] = {rank};
    for (int round = 0; round < relay::rounds(ranks); ++round) {
      const auto before = kept;
      for (int rank = 0; rank < ranks; ++rank) {
        auto& mine = kept[static_cast<std::size_t>(rank)];
        const auto& theirs =
            before[static_cast<std::size_t>(relay::round_of(round, rank, ranks).from)];
        ASSERT_EQ(mine.size(), std::size_t{1} << round);
        mine.insert(mine.end(), theirs.begin(), theirs.begin() + relay::parts_sent(round, ranks));
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const auto& mine = kept[static_cast<std::size_t>(rank)];
      ASSERT_EQ(mine.size(), count);
      for (int place = 0; place < ranks; ++place) {
        EXPECT_EQ(mine[static_cast<std::size_t>(place)], relay::rank_at(place, rank, ranks));
        EXPECT_EQ(relay::place_of(relay::rank_at(place, rank, ranks), rank, ranks), place);
      }
    }
  }
}

TEST(Relay, SendsAsManyBytesAsEveryoneToEveryone) {
  for (const int ranks : sizes()) {
    const std::vector<std::int64_t> equal(static_cast<std::size_t>(ranks), 24);
    EXPECT_EQ(relay::gathered_bytes_sent(equal, ranks / 2), 24 * (ranks - 1));
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(ranks));
    std::iota(lengths.begin(), lengths.end(), 0);
    std::int64_t sent = 0;
    for (int rank = 0; rank < ranks && ranks < 200; ++rank) {
      sent += relay::gathered_bytes_sent(lengths, rank);
    }
    if (ranks < 200) {
      EXPECT_EQ(sent, (ranks - 1) * std::accumulate(lengths.begin(), lengths.end(), 0));
    }
  }
}

TEST(Relay, PartsOfOtherLengthsBeginWhereTheOnesBeforeThemEnd) {
  EXPECT_EQ(relay::begins({5, 0, 7}, 0), (std::vector<std::int64_t>{0, 5, 12, 12}));
  EXPECT_EQ(relay::begins({5, 0, 7}, 2), (std::vector<std::int64_t>{0, 7, 7, 12}));
}

}  // namespace
}  // namespace tessera::comm::relay_test
