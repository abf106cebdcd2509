// The culprit of a hang, found from drawn boards: ranks run the same steps over groups of two axes
// until one of them goes wrong; the others continue as far as they can without it.
#include <random>

#include "launch/hang/hang_finder.h"
#include "support/test.h"
#include "tessera/error.h"

namespace tessera::comm::hang_report_test {
namespace {

using Kinds = std::vector<std::string>;

struct Call {
  std::string group;  ///< its name
  std::uint64_t what = 0;
  std::string unit;
  std::uint64_t sequence = 0;
};

/// Ranks on a grid of two axes. Each step goes through some layers: a gather over the rows,
/// exchanges over the columns; then a sum over all.
struct Grid {
  int rows = 2, columns = 2, layers = 3;
  int ranks() const { return rows * columns; }
  std::vector<int> row(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < columns; ++i) ranks.push_back(rank / columns * columns + i);
    return ranks;
  }
  std::vector<int> column(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < rows; ++i) ranks.push_back(rank % columns + i * columns);
    return ranks;
  }
  static std::string name(const std::string& purpose, const std::vector<int>& ranks) {
    std::string text = purpose + " of ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? "" : ",", ranks[i]);
    return text;
  }
  std::vector<Call> step(int rank) const {
    std::vector<Call> calls;
    std::vector<int> all;
    for (int i = 0; i < ranks(); ++i) all.push_back(i);
    for (int layer = 0; layer < layers; ++layer) {
      const std::string unit = concat("layers.", layer);
      const auto number = static_cast<std::uint64_t>(layer);
      calls.push_back({name("gather", column(rank)), 100 + number, unit});
      calls.push_back({name("transitions on tp", row(rank)), 200 + number, unit + " (enter)"});
      calls.push_back({name("transitions on tp", row(rank)), 300 + number, unit + " (leave)"});
    }
    calls.push_back({name("data", all), 400, "gradient norm"});
    return calls;
  }
};

std::uint64_t hash_of(const std::string& group) { return std::hash<std::string>{}(group) | 1U; }

/// Runs the ranks in turn: each issues what comes next, and waits for it until all of its group
/// have issued it under that number.
class Simulation {
 public:
  Simulation(const Grid& grid, int steps) : grid_(grid) {
    for (int rank = 0; rank < grid.ranks(); ++rank) {
      auto& calls = calls_.emplace_back();
      for (int step = 0; step < steps; ++step) {
        for (const Call& call : grid.step(rank)) calls.push_back(call);
      }
    }
    at_.resize(calls_.size());
    counts_.resize(calls_.size());
    boards_.resize(calls_.size());
  }

  std::vector<Call>& calls(int rank) { return calls_[static_cast<std::size_t>(rank)]; }
  void ends(int rank, std::size_t before) { end_[rank] = before; }

  Boards run(const std::set<int>& without) {
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < grid_.ranks(); ++rank) moves = moves_on(rank) || moves;
    }
    Boards all{grid_.ranks(), 0, {}, {}, {}};
    for (int rank = 0; rank < grid_.ranks(); ++rank) {
      if (without.contains(rank)) {
        all.silent.push_back(rank);
      } else {
        all.boards.push_back(board(rank));
      }
    }
    return all;
  }

 private:
  bool moves_on(int rank) {
    const auto self = static_cast<std::size_t>(rank);
    if (waiting_.contains(rank) && !is_complete(rank)) return false;
    waiting_.erase(rank);
    const std::size_t next = at_[self];
    if (next == calls_[self].size() || (end_.contains(rank) && next >= end_[rank])) return false;
    Call call = calls_[self][at_[self]++];
    call.sequence = counts_[self][call.group]++;
    issued_[{call.group, call.sequence}][rank] = call.what;
    boards_[self].push_back(call);
    waiting_[rank] = call;
    return true;
  }
  bool is_complete(int rank) {
    const Call& call = waiting_.at(rank);
    const auto& issued = issued_[{call.group, call.sequence}];
    return std::ranges::all_of(ranks_in(call.group), [&](int member) {
      const auto found = issued.find(member);
      return found != issued.end() && found->second == call.what;
    });
  }
  RankBoard board(int rank) {
    const auto self = static_cast<std::size_t>(rank);
    RankBoard board;
    board.rank = rank;
    for (const auto& [group, count] : counts_[self])
      board.lanes.push_back({hash_of(group), group, count});
    std::int64_t age = static_cast<std::int64_t>(boards_[self].size()) + 3000;
    for (const Call& call : boards_[self]) {
      const bool waits = &call == &boards_[self].back() && waiting_.contains(rank);
      board.items.push_back(
          {hash_of(call.group), call.what, call.sequence, age--, Pass::kForward, !waits});
      board.names[call.what] = {"op", call.unit, 0};
    }
    if (waiting_.contains(rank)) {
      const Call& call = waiting_.at(rank);
      board.threads_waiting = 1;
      board.waits.push_back(
          {hash_of(call.group), call.what, call.sequence, -1, 3000, Pass::kForward, call.unit});
    }
    return board;
  }

  const Grid grid_;
  std::vector<std::vector<Call>> calls_;
  std::vector<std::size_t> at_;
  std::vector<std::map<std::string, std::uint64_t>> counts_;
  std::vector<std::vector<Call>> boards_;
  std::map<int, Call> waiting_;
  std::map<int, std::size_t> end_;
  std::map<std::pair<std::string, std::uint64_t>, std::map<int, std::uint64_t>> issued_;
};

struct Drawn {
  Grid grid;
  std::string kind;
  int rank = 0;
  std::size_t at = 0;
};

Drawn drawn(unsigned seed) {
  std::mt19937 random(seed);
  const Kinds kinds{"gone", "computes", "skips", "twice", "swaps"};
  Drawn one;
  one.grid = {2 + static_cast<int>(random() % 3), 2 + static_cast<int>(random() % 3),
              2 + static_cast<int>(random() % 4)};
  one.kind = kinds[random() % kinds.size()];
  one.rank = static_cast<int>(random() % static_cast<unsigned>(one.grid.ranks()));
  const std::size_t step = one.grid.step(0).size();
  one.at = 3 * step + random() % step;
  return one;
}

TEST(HangReport, OfDrawnBoardsNamesTheRankAndTheUnit) {
  int hangs = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    const Drawn one = drawn(seed);
    SCOPED_TRACE(concat("seed ", seed, ": rank ", one.rank, " ", one.kind, " at ", one.at, ", ",
                        one.grid.rows, " x ", one.grid.columns));
    Simulation ranks(one.grid, 6);
    auto& calls = ranks.calls(one.rank);
    const auto place = calls.begin() + static_cast<std::ptrdiff_t>(one.at);
    const Call truth = *place;
    if (one.kind == "gone" || one.kind == "computes") ranks.ends(one.rank, one.at);
    if (one.kind == "skips") calls.erase(place);
    if (one.kind == "twice") calls.insert(place, truth);
    if (one.kind == "swaps") std::swap(*place, *(place + 1));
    const Boards boards = ranks.run(one.kind == "gone" ? std::set{one.rank} : std::set<int>{});
    const HangReport report = find_hang(boards);
    // Ranks of another group may have done the second one of two already: then all continue.
    if (one.kind == "swaps" && report.waits.empty()) continue;
    ++hangs;
    ASSERT_FALSE(report.roots.empty());
    EXPECT_EQ(report.roots.front().rank, one.rank) << to_string(report);
    EXPECT_THAT(to_string(report).substr(0, to_string(report).find('\n', 60)), Says(truth.unit));
  }
  EXPECT_GT(hangs, 340);
}

TEST(HangReport, IsShortForAThousandRanks) {
  const Grid grid{32, 32, 2};
  Simulation ranks(grid, 4);
  ranks.ends(77, 3 * grid.step(0).size() + 2);
  const std::string text = to_string(find_hang(ranks.run({77})));
  EXPECT_THAT(text, Says("rank 77 is gone"));
  EXPECT_LE(std::ranges::count(text, '\n'), 20);
  EXPECT_LE(text.size(), 6000U);
}

/// Writes the board of a rank item by item. A message's lane is "messages".
class Written {
 public:
  explicit Written(int rank) { board_.rank = rank; }

  /// `what` is odd for a send, one less for its receive; -1 of `until_done`: not through.
  void issues(const std::string& lane, std::uint64_t what, int until_done = 0) {
    BoardItem item;
    item.what = what;
    item.lane = lane == "messages" ? kMessageLane : hash_of(lane);
    const std::uint64_t number = counts_[{item.lane, what}]++;
    // The same at both ends of a message, and another one in each step.
    item.sequence = item.lane == kMessageLane ? (what | 1U) * 1000 + number : lane_counts_[lane]++;
    item.age_ms = 5000 - static_cast<std::int64_t>(board_.items.size());
    item.done = until_done >= 0;
    item.issued_until_done = static_cast<std::uint64_t>(std::max(until_done, 0));
    board_.items.push_back(item);
    board_.names[what] = {"op", concat("unit ", what), 0};
  }
  RankBoard computes() const {
    RankBoard board = board_;
    for (const auto& [name, count] : lane_counts_) {
      board.lanes.push_back({hash_of(name), name, count});
    }
    return board;
  }
  RankBoard waits(const std::string& lane, std::uint64_t what, int peer) const {
    RankBoard board = computes();
    board.threads_waiting = 1;
    const auto item = std::find_if(board.items.rbegin(), board.items.rend(),
                                   [&](const BoardItem& one) { return one.what == what; });
    board.waits.push_back({item->lane, what, item->sequence, peer, 3000, Pass::kForward, lane});
    return board;
  }

 private:
  RankBoard board_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> counts_;
  std::map<std::string, std::uint64_t> lane_counts_;
};

// Two stages of two ranks: 0 and 1 gather, send activations (11) and wait for gradients (13), whose
// receives they have posted at the beginning of the step; 2 and 3 the other way round. Rank 1
// leaves out its gather: 0 waits for 1 in it, 1 for the gradients of 3, 3 in its gather for 2, and
// 2 for what 0 sends.
TEST(HangReport, AGatherIsLeftOutByARankThatWaitsForAMessageInACycle) {
  const std::string first = "gather of ranks 0,1", second = "gather of ranks 2,3";
  std::vector<Written> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.emplace_back(rank);
  const auto begins = [&](std::size_t rank, int until_done) {
    ranks[rank].issues("messages", rank < 2 ? 12 : 10, until_done);
  };
  const auto sends = [&](std::size_t rank) { ranks[rank].issues("messages", rank < 2 ? 11 : 13); };
  for (int step = 0; step < 3; ++step) {
    for (std::size_t rank = 0; rank < 4; ++rank) {
      begins(rank, rank < 2 ? 2 : 0);
      ranks[rank].issues(rank < 2 ? first : second, rank < 2 ? 100 : 200);
      sends(rank);
    }
  }
  begins(0, -1);
  ranks[0].issues(first, 100, -1);
  begins(1, -1);
  sends(1);
  begins(2, -1);
  begins(3, 0);
  ranks[3].issues(second, 200, -1);
  const Boards boards{4,
                      0,
                      {ranks[0].waits(first, 100, 1), ranks[1].waits("messages", 12, 3),
                       ranks[2].waits("messages", 10, 0), ranks[3].waits(second, 200, 2)},
                      {},
                      {}};
  const HangReport report = find_hang(boards);
  ASSERT_EQ(report.roots.size(), 1U) << to_string(report);
  EXPECT_EQ(report.roots.front().rank, 1) << to_string(report);
  EXPECT_EQ(report.roots.front().how, "skipped one");
  EXPECT_EQ(report.roots.front().should->words.unit, "unit 100") << to_string(report);
}

// Rank 2 is lost while all compute. Rank 3 has all but one of its groups in common with it, and
// both have come to unit 300; what comes next there is a group of rank 3 and others alone.
TEST(HangReport, ARankThatIsLostBeforeAnybodyWaitsForItIsPlacedByTheOrderOfAnother) {
  const std::string rows = "gather of ranks 2,3", all = "data of ranks 0,1,2,3";
  Written like(3), other(1);
  for (int step = 0; step < 4; ++step) {
    like.issues(rows, 200);
    like.issues(all, 300);
    other.issues("gather of ranks 0,1", 200);
    other.issues(all, 300);
    if (step == 3) break;
    like.issues("replicas of ranks 1,3", 400);
    like.issues(rows, 500);
  }
  const HangReport report = find_hang({4, 1, {other.computes(), like.computes()}, {2}, {0}});
  ASSERT_FALSE(report.roots.empty());
  EXPECT_EQ(report.roots.front().rank, 2) << to_string(report);
  ASSERT_TRUE(report.roots.front().should) << to_string(report);
  EXPECT_EQ(report.roots.front().should->words.unit, "unit 500") << to_string(report);
}

// Threads of a rank issue in separate lanes, each in one order; how these meet differs from step to
// step.
TEST(RankBoard, WhatComesNextIsFoundInTheStepBeforeInAnyOrderOfThreads) {
  std::mt19937 random(44);
  for (int draw = 0; draw < 200; ++draw) {
    const std::size_t lanes = 2 + random() % 3, length = 3 + random() % 9;
    Written board(0);
    std::map<std::uint64_t, std::size_t> before;  // where the step before issued it
    std::size_t count = 0;
    std::vector<std::size_t> at(lanes);
    const auto issue = [&](std::size_t lane) {
      const std::uint64_t what = 100 * lane + at[lane]++;
      before[what] = count++;
      board.issues(concat("lane ", lane, " of ranks 0,1"), what);
    };
    for (int step = 0; step < 3; ++step) {
      at.assign(lanes, 0);
      while (std::ranges::any_of(at, [&](std::size_t of) { return of < length; })) {
        if (const std::size_t lane = random() % lanes; at[lane] < length) issue(lane);
      }
    }
    at.assign(lanes, 0);
    for (std::size_t i = random() % (lanes * length); i-- > 0;) {
      if (const std::size_t lane = random() % lanes; at[lane] + 1 < length) issue(lane);
    }
    const RankBoard all = board.waits("lane 0 of ranks 0,1", 0, 1);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      for (std::size_t i = at[lane]; i < length; ++i) {
        const std::uint64_t what = 100 * lane + i;
        const std::string name = concat("lane ", lane, " of ranks 0,1");
        EXPECT_EQ(next_of(all, {hash_of(name), what}), before.at(what)) << "draw " << draw;
      }
    }
  }
}

TEST(OrderLog, CountsWhatWasIssuedUntilTheEndAndForgetsWhatCameBeforeARecovery) {
  OrderLog log;
  const auto issue = [&](std::uint64_t what) {
    return log.note({7, what, what, std::chrono::steady_clock::now()},
                    [] { return std::shared_ptr<const Issue>(); });
  };
  const auto first = issue(1);
  issue(2);
  issue(3);
  log.done(first);
  issue(4);
  const auto items = log.latest(10);
  ASSERT_EQ(items.size(), 4U);
  EXPECT_TRUE(items[0].done);
  EXPECT_EQ(items[0].issued_until_done, 2U);
  EXPECT_FALSE(items[1].done);
  log.clear();
  issue(5);
  log.done(first);  // by a wait of before
  ASSERT_EQ(log.latest(10).size(), 1U);
  EXPECT_EQ(log.latest(10)[0].what, 5U);
  EXPECT_FALSE(log.latest(10)[0].done);
}

TEST(RankBoard, IsTheSameBehindEncodingAndNothingElseIsRead) {
  Simulation ranks({2, 2, 3}, 4);
  ranks.ends(1, 25);
  for (RankBoard board : ranks.run({}).boards) {
    board.waits.push_back({kMessageLane, 7, 11, 2, 5, Pass::kBackward, "a message"});
    board.items.push_back({kMessageLane, 6, 99, 1, Pass::kBackward});
    const std::string text = encode(board);
    EXPECT_EQ(decode_board(text), board);
    std::mt19937 random(5);
    for (int i = 0; i < 300; ++i) {
      std::string other = text;
      other[random() % other.size()] = static_cast<char>(random() % 128);
      if (auto read = decode_board(other)) {
        static_cast<void>(to_string(find_hang({4, 0, {*std::move(read)}, {}, {}})));
      }
      EXPECT_EQ(decode_board(text.substr(0, random() % (text.size() - 1))), std::nullopt);
    }
  }
}

TEST(RankBoard, NumbersThatNoRankWritesDoNotOverflow) {
  const std::string lane = "gather of ranks 0,1";
  for (const std::string number : {"9223372036854775807", "-9223372036854775808",
                                   "9223372036854775808", "4611686018427387904"}) {
    // A wait has a time; an item has an age, and the number issued until it was done.
    const std::string wait = concat("\n", hash_of(lane), " 5 0 1 ", number, " 0 a wait");
    const std::string names = concat("\n", hash_of(lane), " 1 ", lane, "\n5 0 op\n unit");
    for (const std::string& item : {concat("\n0 0 0 ", number, " 0 0"), "\n0 0 0 1 0 " + number}) {
      const auto board = decode_board("1 1 1 1 1 1" + wait + names + item + "\nend\n");
      if (!board) continue;
      EXPECT_GE(board->waits[0].waited_ms, 0);
      EXPECT_GE(board->items[0].age_ms, 0);
      EXPECT_LE(board->waits[0].waited_ms, std::int64_t{1} << 40);
      EXPECT_LE(board->items[0].age_ms, std::int64_t{1} << 40);
      EXPECT_THAT(to_string(find_hang({2, 0, {*board}, {}, {}})), Says("hang report"));
    }
  }
  for (const std::string ranks :
       {"65536 to 65536 by 2147483648", "0 to 65537", "0 to 99999999999", "-1 to 3", "-1,2",
        "99999999999", "0 to 4 by 0", "0 to 4 by -1", " to ", "1 to "}) {
    EXPECT_THAT(ranks_in("gather of ranks " + ranks), ElementsAre()) << ranks;
  }
  EXPECT_THAT(ranks_in("gather of ranks 65535 to 65536 by 65536"), ElementsAre(65535));
}

TEST(RankBoard, RanksOfAGroupAreReadFromItsName) {
  EXPECT_THAT(ranks_in("gather of ranks 0,3"), ElementsAre(0, 3));
  EXPECT_THAT(ranks_in("data of ranks 2 to 4"), ElementsAre(2, 3, 4));
  EXPECT_THAT(ranks_in("data of ranks 1 to 9 by 4"), ElementsAre(1, 5, 9));
  EXPECT_THAT(ranks_in("of mine"), ElementsAre());
  EXPECT_THAT(ranks_in("g of ranks 1,x"), ElementsAre());
}

}  // namespace
}  // namespace tessera::comm::hang_report_test
